"""The Responses API of a server."""

from servers import serving

TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{{ message.content[0].text }}{% endif %}{% endfor %}"
)

with serving("--chat-template", TEMPLATE) as (url, client):
    answer = client.responses.create(model="demo", input="27 + 58 =", max_output_tokens=8, temperature=0)
    assert answer.output_text.strip() == "85"
    assert answer.status in ("completed", "incomplete")
    events = list(
        client.responses.create(model="demo", input="27 + 58 =", max_output_tokens=8, temperature=0, stream=True)
    )
    assert events[0].type == "response.created"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas).strip() == "85"
