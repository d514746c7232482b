"""Chat templates that users give, as text or as files. Imports nothing large, because option parsing uses it."""

from __future__ import annotations

import os
from pathlib import Path

from raycore.errors import InvalidConfig
from raycore.json_fields import shortened


def read_chat_template(given: str | os.PathLike[str] | None) -> str | None:
    """The text of a chat template that is given as text or as the path of a file.

    Raises:
        InvalidConfig: `given` is neither Jinja text nor the path of a file with it.
    """
    if given is None:
        return None
    if isinstance(given, str) and "{" in given:
        text, name = given, shortened(given)
    else:
        path, name = Path(given), repr(str(given))
        if not path.is_file():
            raise InvalidConfig(f"chat_template={name} is neither an existing file nor the text of a Jinja template")
        text = path.read_text(encoding="utf-8")
    from raycore.text.chat_template import syntax_error  # imported lazily: it imports Jinja

    problem = syntax_error(text)
    if problem is not None:
        raise InvalidConfig(f"chat_template={name} isn't a Jinja template: {problem}")
    return text
