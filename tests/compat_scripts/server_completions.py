"""Completions from a server, whole and streamed."""

from servers import serving

with serving("--return-tokens-as-token-ids") as (url, client):
    models = client.models.list()
    assert [model.id for model in models.data] == ["demo"]
    completion = client.completions.create(model="demo", prompt="27 + 58 =", max_tokens=8, temperature=0)
    assert completion.choices[0].text.strip() == "85"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage.prompt_tokens > 0
    several = client.completions.create(
        model="demo", prompt=["11 + 12 =", "40 - 15 ="], max_tokens=8, temperature=0, echo=True, logprobs=2
    )
    assert [choice.text.strip() for choice in several.choices] == ["11 + 12 = 23", "40 - 15 = 25"]
    assert several.choices[0].logprobs.tokens[0].startswith("token_id:")
    stream = client.completions.create(
        model="demo",
        prompt="27 + 58 =",
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"min_p": 0.0, "top_k": -1, "repetition_penalty": 1.0, "ignore_eos": False},
    )
    events = list(stream)
    assert "".join(event.choices[0].text for event in events if event.choices).strip() == "85"
    assert events[-1].usage.completion_tokens == completion.usage.completion_tokens
