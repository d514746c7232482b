"""The parser of vLLM's scripts: flags with hyphens or underscores, and settings of JSON objects one by one."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

_SETTING = re.compile(r"(--[\w-]+)\.([\w.-]+?)(\+?)(?:=(.*))?", re.DOTALL)
"""`--flag.setting value`, or with `+` to append to a list."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that takes a flag with hyphens as well as with underscores.

    The settings of a flag whose value is a JSON object may be given one by one: `--flag.a.b 1` is `--flag '{"a": {"b":
    1}}'`, and `--flag.c+ x` appends to a list.
    """

    def __init__(self, *args: Any, add_json_tip: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)

    def add_argument(self, *args: Any, deprecated: bool = False, **options: Any) -> argparse.Action:
        """As in argparse. `deprecated` is taken by all versions of Python, and has no effect."""
        return super().add_argument(*args, **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As in argparse."""
        given = sys.argv[1:] if args is None else list(args)
        end = given.index("--") if "--" in given else len(given)
        known = [self._spelled(each) for each in given[:end]]
        return super().parse_known_args([*_with_objects(known), *given[end:]], namespace)

    def _spelled(self, text: str) -> str:
        """A flag as it was added, if it was added with other hyphens or underscores."""
        if not text.startswith("--"):
            return text
        name = re.match(r"[^=.]*", text)
        assert name is not None
        given = name.group()
        spellings = (given, *(f"--{given[2:].replace(old, new)}" for old, new in ("_-", "-_")))
        found = next((each for each in spellings if each in self._option_string_actions), given)
        return found + text[len(given) :]


def _with_objects(args: Sequence[str]) -> list[str]:
    """Join the settings of each object into one flag, at the place of the first setting."""
    objects: dict[str, dict[str, Any]] = {}
    kept: list[str] = []
    pending = list(args)
    while pending:
        match = _SETTING.fullmatch(pending[0])
        if match is None:
            kept.append(pending.pop(0))
            continue
        flag, path, appends, value = match.groups()
        pending.pop(0)
        if value is None and pending:
            value = pending.pop(0)
        if flag not in objects:
            objects[flag] = {}
            kept += [flag, ""]
        _set(objects[flag], path.split("."), _value(value or ""), appends=bool(appends))
        kept[kept.index(flag) + 1] = json.dumps(objects[flag])
    return kept


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _set(settings: dict[str, Any], path: Sequence[str], value: Any, *, appends: bool) -> None:
    for name in path[:-1]:
        settings = settings.setdefault(name, {})
    if appends:
        values = value.split(",") if isinstance(value, str) else [value]
        settings[path[-1]] = [*settings.get(path[-1], []), *values]
    else:
        settings[path[-1]] = value
