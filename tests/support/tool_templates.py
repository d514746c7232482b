"""Chat templates with tools, in the forms that families of models have, as short as can be."""

_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _template(calls: str) -> str:
    return (
        _TOOLS
        + "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        + "{% for call in message.tool_calls or [] %}"
        + calls
        + "{% endfor %}<|im_end|>\n{% endfor %}"
        + _END
    )


HERMES = _template(
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
)
LLAMA3 = _template('{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}')
QWEN3_CODER = _template(
    "<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>\n{% if value is mapping or (value is sequence and value is not string) %}"
    "{{ value | tojson }}{% else %}{{ value }}{% endif %}{{ '\n' }}</parameter>\n{% endfor %}</function>\n</tool_call>"
)
GLM45 = _template(
    "\n<tool_call>{{ call.function.name }}\n{% for key, value in call.function.arguments.items() %}"
    "<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else (value | tojson) }}</arg_value>\n{% endfor %}</tool_call>"
)
GLM47 = (
    GLM45.replace("\n<tool_call>{{ call.function.name }}\n", "<tool_call>{{ call.function.name }}")
    .replace("</arg_key>\n", "</arg_key>")
    .replace("</arg_value>\n", "</arg_value>")
)
MINIMAX_M2 = _template(
    "{% if loop.first %}\n<minimax:tool_call>\n{% endif %}"
    '<invoke name="{{ call.function.name }}">\n{% for key, value in call.function.arguments.items() %}'
    '<parameter name="{{ key }}">{{ value if value is string else (value | tojson) }}</parameter>\n{% endfor %}'
    "</invoke>\n{% if loop.last %}</minimax:tool_call>{% endif %}"
)
"""All calls are in one block."""
PYTHONIC = _template(
    "{% if loop.first %}[{% endif %}{{ call.function.name }}("
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}){% if loop.last %}]{% else %}, {% endif %}"
)
_ID_OF_NINE = "{% if call.id | length != 9 %}{{ raise_exception('An id has nine characters.') }}{% endif %}"
_MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ message.content }}CALLS</s>"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.tool_call_id }}:{{ message.content }}[/TOOL_RESULTS]"
    "{% else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"
)
MISTRAL_LIST = _MISTRAL.replace(
    "CALLS",
    "{% if message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    + _ID_OF_NINE
    + '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}",
)
"""Mistral's older form, as models with SentencePiece tokenizers have it. With others, there is no space."""
MISTRAL = _MISTRAL.replace(
    "CALLS",
    "{% for call in message.tool_calls or [] %}"
    + _ID_OF_NINE
    + "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}",
)
"""Mistral's newer form."""
HARMONY = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for message in messages %}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<|start|>assistant to=functions."
    "{{ call.function.name }}<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>"
    "{% endfor %}{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
OTHER_FORM = _template("[{{ call.function.name }}({{ call.function.arguments | tojson }})]")
"""A form that no parser reads."""
THINKING = HERMES.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
"""The prompt opens the reasoning."""
QWEN3 = (
    HERMES.replace(
        "{{ message.content }}",
        "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ message.content }}",
    )
    + "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
"""The model opens its reasoning itself, unless the request turns it off."""
QWEN2_5 = (
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}"
    "You are Qwen.{% endif %}<|im_end|>\n" + _TOOLS + "{% for message in messages %}"
    "{% if message.role in ('user', 'assistant') or (message.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}" + _END
)
"""Leaves out messages of roles that it doesn't name, as Qwen 2.5's does."""
