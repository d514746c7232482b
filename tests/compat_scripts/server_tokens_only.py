"""A server that only takes and gives tokens, and stops requests by their ids."""

import json
import urllib.request

from servers import serving

PROMPT = [5, 6, 7, 8]

with serving("--tokens-only") as (url, client):

    def post(path, **body):
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=60)

    def generate(**params):
        return post("/inference/v1/generate", token_ids=PROMPT, sampling_params={"temperature": 0, **params})

    answer = json.load(generate(max_tokens=8, ignore_eos=True))
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == 8
    assert choice["finish_reason"] == "length"
    seeded = [json.load(generate(max_tokens=4, ignore_eos=True, temperature=1, seed=5)) for _ in range(2)]
    assert seeded[0]["choices"][0]["token_ids"] == seeded[1]["choices"][0]["token_ids"]
    with post("/inference/v1/abort_requests", request_ids=["generate-tokens-nobody"]) as aborted:
        assert aborted.status == 200
