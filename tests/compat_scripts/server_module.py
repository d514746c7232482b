"""A server that is started as a module, with a key."""

import sys

import openai
from servers import serving

MODULE = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")


def refusal(client, model):
    try:
        client.completions.create(model=model, prompt="1 + 1 =")
    except openai.APIStatusError as error:
        return error
    return None


with serving("--api-key", "secret", "--seed", "1", "--dtype", "bfloat16", command=MODULE) as (url, client):
    assert isinstance(refusal(client, "demo"), openai.AuthenticationError)
    allowed = client.with_options(api_key="secret")
    completion = allowed.completions.create(model="demo", prompt="27 + 58 =", temperature=0)
    assert completion.choices[0].text.startswith(" 85")
    unknown = refusal(allowed, "other")
    assert isinstance(unknown, openai.NotFoundError)
    assert "other" in str(unknown)
