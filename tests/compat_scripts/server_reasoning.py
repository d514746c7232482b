"""The reasoning is apart from the answer."""

from servers import serving

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

with serving("--reasoning-parser", "deepseek_r1", "--chat-template", TEMPLATE) as (url, client):
    messages = [{"role": "user", "content": "27 + 58 ="}]
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=8, temperature=0)
    # the model never closes its reasoning
    assert answer.choices[0].message.reasoning.strip() == "85"
    assert not answer.choices[0].message.content
    stream = client.chat.completions.create(model="demo", messages=messages, max_tokens=8, temperature=0, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas).strip() == "85"
