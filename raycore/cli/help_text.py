"""`--help`: a short form for commands with many flags, and `--help=KEYWORD` for groups, single flags and searches.

A flag is in the short form if its option is declared as common (`raycore.options.declared`), or has no group.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import pydoc
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

_ALL, _PAGE, _GROUPS = "all", "page", "listgroup"
_COMMON = "is_common"

_HELP = (
    "Show the flags that are used most. KEYWORD: all of them, page (all, in a pager), a group, a flag, or a word that "
    "flags are about."
)
_FIRST_SENTENCE = re.compile(r"(.*?\.)(?: .*?)??( Default: .*)?", re.DOTALL)


def mark_common(action: argparse.Action) -> None:
    """Have the short form of the help show a flag."""
    setattr(action, _COMMON, True)


class HelpAction(argparse.Action):
    """`--help`. Shows what the keyword names, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, "?", default=argparse.SUPPRESS, metavar="KEYWORD")
        self.help = _HELP

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **others: Any) -> None:
        """Show it. Argparse gives the namespace, the keyword and the flag."""
        keyword: str | None = args[1]
        if keyword is None:
            print(_short(parser), end="")
        elif keyword == _PAGE:
            pydoc.pager(parser.format_help())
        else:
            print(_named(parser, keyword), end="")
        parser.exit()


def _short(parser: argparse.ArgumentParser) -> str:
    if not any(map(_is_common, _shown(parser))):
        return parser.format_help()
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    for group in parser._action_groups:
        shown = [each for each in group._group_actions if group in _ungrouped(parser) or _is_common(each)]
        _add_section(formatter, group, map(_shortened, shown))
    return f"{formatter.format_help()}\n{_advice(parser)}"


def _shortened(action: argparse.Action) -> argparse.Action:
    """A flag with the first sentence of its help, and its default."""
    found = _FIRST_SENTENCE.fullmatch(action.help or "")
    if found is None:
        return action
    short = copy.copy(action)
    short.help = found[1] + (found[2] or "")
    return short


def _named(parser: argparse.ArgumentParser, keyword: str) -> str:
    """The help for what a keyword names. Exits with an error if it names nothing."""
    if keyword == _ALL:
        return parser.format_help()
    if keyword == _GROUPS:
        return _advice(parser)
    asked = _plain(keyword)
    for find in (_of_group, _of_flag, _with_name, _with_help) if asked else ():
        found = find(parser, asked)
        if found:
            return _text(parser, found)
    problem = f"no flag or group is called {keyword!r}, and none is about it"
    parser.exit(2, f"{parser.prog}: {problem}; {_nearest(parser, keyword)}\n")
    raise AssertionError("it exits")


def _nearest(parser: argparse.ArgumentParser, keyword: str) -> str:
    """What may have been meant by a keyword that names nothing that is shown."""
    if any(_plain(flag) == _plain(keyword) for action in parser._actions for flag in action.option_strings):
        return "raycore accepts it because vLLM has it, and docs/options.md says what becomes of it"
    known = [flag.lstrip("-") for action in _shown(parser) for flag in action.option_strings]
    known += [group.title for group in _groups(parser)]
    nearest = difflib.get_close_matches(keyword.lstrip("-").replace("_", "-"), known, n=1)
    return f"did you mean --help={nearest[0]!r}?" if nearest else "--help=listgroup lists the groups"


def _of_group(parser: argparse.ArgumentParser, asked: str) -> list[argparse.Action]:
    """The flags of a group: of this name, or with the part of it that vLLM's name has, as in CacheConfig."""
    groups = [group for group in _groups(parser) if _plain(group.title or "") == asked]
    if not groups and asked.endswith("config") and (stem := asked.removesuffix("config")):
        groups = [group for group in _groups(parser) if stem in _plain(group.title or "")]
    return [action for group in groups for action in group._group_actions]


def _of_flag(parser: argparse.ArgumentParser, asked: str) -> list[argparse.Action]:
    return [action for action in _shown(parser) if asked in map(_plain, action.option_strings)]


def _with_name(parser: argparse.ArgumentParser, asked: str) -> list[argparse.Action]:
    return [action for action in _shown(parser) if any(asked in _plain(flag) for flag in action.option_strings)]


def _with_help(parser: argparse.ArgumentParser, asked: str) -> list[argparse.Action]:
    return [action for action in _shown(parser) if asked in _plain(action.help or "")]


def _plain(text: str) -> str:
    """A text without what users may write in one way or another: case, hyphens, underscores and spaces."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _text(parser: argparse.ArgumentParser, shown: Collection[argparse.Action]) -> str:
    """The help of these flags, under the names of their groups."""
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        _add_section(formatter, group, (action for action in group._group_actions if action in shown))
    return formatter.format_help()


def _add_section(formatter: argparse.HelpFormatter, group: Any, actions: Iterable[argparse.Action]) -> None:
    formatter.start_section(group.title)
    formatter.add_arguments(actions)
    formatter.end_section()


def _advice(parser: argparse.ArgumentParser) -> str:
    """Where the other flags are."""
    names = [f"  {group.title} ({len(group._group_actions)})\n" for group in _groups(parser)]
    asks = {"Scheduler": "lists a group", "max-model-len": "explains a flag", "cache": "searches", _ALL: "lists all"}
    examples = [f"  {parser.prog} --help={asked:<14} {does}\n" for asked, does in asks.items()]
    return f"groups of flags, and how many each has:\n{''.join(names)}\nmore help:\n{''.join(examples)}"


def _groups(parser: argparse.ArgumentParser) -> list[Any]:
    return [group for group in parser._action_groups if group not in _ungrouped(parser) and group._group_actions]


def _ungrouped(parser: argparse.ArgumentParser) -> tuple[Any, ...]:
    """Argparse's own groups, for what a command adds to none."""
    return parser._positionals, parser._optionals


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def _is_common(action: argparse.Action) -> bool:
    return getattr(action, _COMMON, False)
