"""Chat with a server, whole and streamed, with log probabilities."""

import tempfile

from servers import serving

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
    file.write(TEMPLATE)
    file.flush()
    with serving("--chat-template", file.name) as (url, client):
        messages = [{"role": "user", "content": "27 + 58 ="}]
        answer = client.chat.completions.create(
            model="demo", messages=messages, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content.strip() == "85"
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
        stream = client.chat.completions.create(
            model="demo", messages=messages, max_completion_tokens=8, temperature=0, stream=True
        )
        deltas = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(deltas) == answer.choices[0].message.content
        several = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": [{"type": "text", "text": "11 + 12 ="}]}],
            n=2,
            seed=1,
            max_tokens=4,
            temperature=1.0,
            extra_body={"top_k": 1, "chat_template_kwargs": {"x": 1}},
        )
        assert [choice.message.content.strip() for choice in several.choices] == ["23", "23"]
