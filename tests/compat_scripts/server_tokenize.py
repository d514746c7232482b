"""A server's tokenizer, version, and metrics."""

import json
import urllib.request

from servers import serving


def call(url, **body):
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60
    ) as answer:
        return answer.read().decode()


with serving() as (url, client):
    tokens = json.loads(call(f"{url}/tokenize", model="demo", prompt="27 + 58 =", return_token_strs=True))
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 512
    assert json.loads(call(f"{url}/detokenize", model="demo", tokens=tokens["tokens"]))["prompt"] == "27 + 58 ="
    assert "version" in json.loads(call(f"{url}/version"))
    client.completions.create(model="demo", prompt=tokens["tokens"], max_tokens=4, extra_body={"ignore_eos": True})
    metrics = call(f"{url}/metrics")
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("vllm:") and 'engine="' in line
    }
    assert values["vllm:generation_tokens_total"] == 4
    assert values["vllm:prompt_tokens_total"] == tokens["count"]
    assert values["vllm:request_success_total"] >= 0
    assert values["vllm:time_to_first_token_seconds_count"] == 1
