"""The parser for calls in which tags with quoted names surround functions and parameters."""

from __future__ import annotations

import re

from raycore.server.parsers.tool_calls.qwen3_coder import Qwen3CoderParser
from raycore.server.parsers.tool_calls.value_scanner import ValueTags


class MiniMaxM2Parser(Qwen3CoderParser):
    r"""The format of MiniMax-M2:

    `<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n…</invoke>\n…`,

    and `</minimax:tool_call>` after the last call of a block. The tags around a block, and the quotes, may be missing.
    """

    opening = "<minimax:tool_call>"
    closing = "</minimax:tool_call>"
    function = "<invoke name="
    end_function = "</invoke>"
    parameter = "<parameter name="
    quote = '"'
    around_value = ""
    next_call = "(closing SPACE? opening)? SPACE? head call"
    in_text = "call (SPACE? head call)* closing"
    value_tags = ValueTags(
        tag=re.compile(
            r'<invoke name=[^<>\n]*>|</invoke>|<parameter name="?([^<>\n]*?)"?>|</parameter>|</minimax:tool_call>'
        ),
        begun=re.compile(r"<[^<>\n]*\Z"),
        end="</parameter>",
        function="<invoke name=",
        end_function="</invoke>",
        after={
            "</parameter>": ("<parameter name=", "</invoke>", closing, "<invoke name=", opening),
            "</invoke>": (closing, "<invoke name=", opening),
            closing: (opening,),
        },
    )
