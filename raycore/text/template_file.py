"""Chat templates that users give, as text or as files. Imports nothing large, because option parsing uses it."""

from __future__ import annotations

import os
from pathlib import Path

from raycore.errors import InvalidConfig


def read_chat_template(given: str | os.PathLike[str] | None) -> str | None:
    """The text of a chat template that is given as text or as the path of a file.

    Raises:
        InvalidConfig: `given` is neither Jinja text nor the path of a file.
    """
    if given is None or (isinstance(given, str) and "{" in given):
        return given
    path = Path(given)
    if not path.is_file():
        raise InvalidConfig(f"chat_template={given} is neither an existing file nor a Jinja template")
    return path.read_text(encoding="utf-8")
