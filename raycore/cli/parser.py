"""An argument parser that suggests known flags, accepts `--some_flag` and `--object.key value`, and reads files."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from raycore.cli.help_text import HelpAction

_CONFIG = "--config"
_NUMBERS: dict[Any, str] = {int: "an integer", float: "a number"}


class Parser(argparse.ArgumentParser):
    """Accepts flags with hyphens or underscores, but not abbreviated. Suggests a known flag for an unknown one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **options)
        self.add_argument("-h", "--help", action=HelpAction)

    def add_config_flag(self) -> None:
        """Add `--config`, which reads flags from a YAML file."""
        self.add_argument(
            _CONFIG,
            metavar="FILE",
            help="YAML file that sets flags, named without their leading hyphens. The command line takes precedence.",
        )

    @property
    def actions(self) -> list[argparse.Action]:
        """The argparse actions of the parser's flags and arguments."""
        return self._actions

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse as argparse does, but exit with an error on unknown arguments. Also called for each subcommand."""
        given = _hyphenated(sys.argv[1:] if args is None else args)
        if _CONFIG in self._option_string_actions:
            given = [*self._from_file(given), *given]
        given = self._with_objects(given)
        known, unknown = super().parse_known_args(given, namespace)
        if unknown:
            self.error(f"unknown {_kind(unknown[0])} {unknown[0]}{self._nearest(unknown[0].partition('=')[0], '--')}")
        return known, []

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        known = list(map(str, action.choices or ()))
        if action.nargs == argparse.PARSER and value not in known:
            nearest = difflib.get_close_matches(str(value), known, n=1)
            advice = f"did you mean {nearest[0]}?" if nearest else f"commands are {', '.join(known)}"
            self.error(f"unknown command {value!r}; {advice}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Print the message, in one line, and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help=all` lists all flags)\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        # argparse would speak of Python's types, as in "invalid int value"
        if (kind := _NUMBERS.get(action.type)) is not None:
            try:
                return cast("Any", action.type)(arg_string)
            except ValueError:
                raise argparse.ArgumentError(action, f"{arg_string!r} isn't {kind}") from None
        return super()._get_value(action, arg_string)  # pyright: ignore[reportUnknownVariableType, reportAttributeAccessIssue]

    def _nearest(self, name: str, hyphens: str) -> str:
        shown = [flag for flag, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        names = [flag.removeprefix(hyphens) for flag in shown if flag.startswith("--")]
        asked = name.removeprefix(hyphens)
        longer = [each for each in names if each.startswith(f"{asked}-")]
        nearest = longer if len(longer) == 1 else difflib.get_close_matches(asked, names, n=1)
        return f"; did you mean {hyphens}{nearest[0]}?" if nearest else ""

    def _from_file(self, args: Sequence[str]) -> list[str]:
        """The flags in the file that `--config` names, as command-line arguments. Empty without `--config`."""
        path = _value_of(_CONFIG, args)
        if path is None:
            return []
        flags: list[str] = []
        for key, value in self._read(path).items():
            flag = f"--{str(key).replace('_', '-')}"
            action = self._option_string_actions.get(flag)
            if action is None or flag == _CONFIG:
                self.error(f"{path}: unknown flag {key!r}{self._nearest(flag, '--').replace('--', '')}")
            flags += _as_flags(flag, value, action)
        # the last flag takes no more values, so a list in the file doesn't take the user's positional arguments
        return [*flags, f"{_CONFIG}={path}"]

    def _with_objects(self, args: Sequence[str]) -> Sequence[str]:
        """Put settings of objects, such as `--option.key value`, together as `--option={"key": "value"}`.

        As in vLLM, a value is JSON, or else text; `key.inner` is a setting of an object in the object; and `key+ a,b`
        adds to a list. Other settings of the same object may be given as JSON.
        """
        end = list(args).index("--") if "--" in args else len(args)
        objects: dict[str, dict[str, Any]] = {}
        rest: list[str] = []
        left = iter(args[:end])
        for arg in left:
            name, equals, value = arg.partition("=")
            flag, dot, path = name.partition(".")
            if not (dot and path and flag in self._option_string_actions):
                rest.append(arg)
                continue
            text = value if equals else next(left, None)
            if text is None:
                self.error(f"argument {arg}: expected one argument")
            _put(objects.setdefault(flag, {}), path.split("."), text)
        for flag, settings in objects.items():
            names = self._option_string_actions[flag].option_strings
            rest, whole = _without_object(rest, names)
            rest.append(f"{names[-1]}={json.dumps(_merged(whole, settings))}")
        return [*rest, *args[end:]] if objects else args

    def _read(self, path: str) -> dict[Any, Any]:
        import yaml  # imported lazily to keep `raycore --help` fast

        try:
            found: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            self.error(f"{_CONFIG} {path} can't be read: {error.strerror}")
        except UnicodeDecodeError as error:
            self.error(f"{_CONFIG} {path} isn't UTF-8: {error.reason} at byte {error.start}")
        except yaml.YAMLError as error:
            self.error(f"{_CONFIG} {path} isn't valid YAML: {' '.join(str(error).split())}")
        if not isinstance(found, dict):
            self.error(f"{_CONFIG} {path}: not a mapping of flags to values")
        return cast("dict[Any, Any]", found)


def _hyphenated(args: Sequence[str]) -> list[str]:
    """Replace underscores in the names of flags by hyphens. Arguments after `--` stay as they are."""
    end = list(args).index("--") if "--" in args else len(args)
    return [*map(_hyphenated_flag, args[:end]), *args[end:]]


def _hyphenated_flag(text: str) -> str:
    if not text.startswith("--"):
        return text
    name, equals, value = text.partition("=")
    flag, dot, path = name.partition(".")
    return f"{flag.replace('_', '-')}{dot}{path}{equals}{value}"


def _put(settings: dict[str, Any], path: Sequence[str], text: str) -> None:
    """Set what `path` names in an object to what a text stands for."""
    *outer, last = path
    for key in outer:
        inner = settings.get(key)
        settings[key] = settings = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
    if last.endswith("+"):
        before = settings.get(last[:-1])
        added = [_value(each) for each in text.split(",")]
        settings[last[:-1]] = [*cast("list[Any]", before), *added] if isinstance(before, list) else added
    else:
        settings[last] = _value(text)


def _value(text: str) -> Any:
    if text in ("True", "False", "None"):  # as Python writes them
        return {"True": True, "False": False, "None": None}[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _without_object(args: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The arguments without a flag whose value is an object in JSON, and the object."""
    rest: list[str] = []
    whole: dict[str, Any] = {}
    left = iter(args)
    for arg in left:
        name, equals, value = arg.partition("=")
        if name in names:
            text = value if equals else next(left, "")
            found = _value(text)
            if isinstance(found, dict):
                whole = cast("dict[str, Any]", found)
            else:
                rest += [arg] if equals else [arg, text]
        else:
            rest.append(arg)
    return rest, whole


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for key, value in other.items():
        before = merged.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            merged[key] = _merged(cast("dict[str, Any]", before), cast("dict[str, Any]", value))
        else:
            merged[key] = value
    return merged


def _kind(text: str) -> str:
    return "flag" if text.startswith("-") else "argument"


def _value_of(flag: str, args: Sequence[str]) -> str | None:
    values: Iterator[str] = iter(args)
    for arg in values:
        if arg == "--":
            return None
        name, equals, value = arg.partition("=")
        if name == flag:
            return value if equals else next(values, None)
    return None


def _as_flags(flag: str, value: Any, action: argparse.Action) -> list[str]:
    """A flag from a file, as command-line arguments. If None isn't a valid value, None leaves the flag out."""
    if action.nargs == 0:
        if isinstance(action, argparse.BooleanOptionalAction) and value is False:
            return [f"--no-{flag[2:]}"]
        return [flag] if value is True else [] if value in (False, None) else [f"{flag}={value}"]
    if isinstance(value, list):
        return [flag, *(_as_text(each) for each in cast("list[Any]", value))]
    if value is None:
        return [f"{flag}=none"] if getattr(action.type, "takes_none", False) else []
    return [f"{flag}={_as_text(value)}"]


def _as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, bool)) else str(value)
