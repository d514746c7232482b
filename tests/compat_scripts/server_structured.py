"""Answers of a server that follow a schema, a choice, a pattern."""

import json
import re

from servers import serving

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
COMPACT = '{"backend": "xgrammar", "disable_any_whitespace": true}'  # a small model may write blanks without end
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["sum", "difference"]}},
    "required": ["kind"],
    "additionalProperties": False,
}

with serving("--chat-template", TEMPLATE, "--structured-outputs-config", COMPACT) as (url, client):

    def ask(**fields):
        answer = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "27 + 58 ="}], max_tokens=400, temperature=0, **fields
        )
        return answer.choices[0].message.content

    form = {"type": "json_schema", "json_schema": {"name": "kind", "schema": SCHEMA, "strict": True}}
    assert json.loads(ask(response_format=form))["kind"] in ("sum", "difference")
    assert ask(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}) in ("yes", "no")
    assert re.fullmatch(r"\d{2}:\d{2}", ask(extra_body={"structured_outputs": {"regex": r"\d{2}:\d{2}"}}))
