"""Translates structural tags to llguidance's variant of Lark. Pure.

A structural tag describes texts in which the parts that begin with certain tags follow formats. There are two forms, as
in vLLM. The older one has `structures`, each with `begin`, `schema` and `end`, and `triggers`. The other one has a
`format`, an object whose `type` is one of those in `_Translation`. Free text ends where a trigger or the end of the
enclosing tag begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.lark import SpecialTokens, pattern_of_choice, pattern_rule
from raycore.parts.constraints.grammar.schema import enforceable
from raycore.parts.constraints.grammar.schema_values import DECODER

T = TypeVar("T")

MAX_DEPTH = 50
"""Maximum nesting of formats."""
MAX_PARTS = 2_000
"""Maximum number of formats in one structural tag."""
MAX_REPEATS = 1_000
"""Maximum number of times that a format can be repeated."""
ANY_TEXT = r"/(.|\n)*/"


def structural_tag_grammar(text: str, special: SpecialTokens, space: Mapping[str, Any]) -> str:
    """A Lark grammar of the texts that a structural tag, given as JSON text, allows.

    Args:
        space: the options of JSON's white space, for schemas.

    Raises:
        InvalidRequest: the structural tag isn't valid, or can't be expressed. The message begins with a JSON pointer.
    """
    try:
        given: Any = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the structural tag isn't valid JSON: {error}") from error
    translation = _Translation(special, space)
    if isinstance(given, dict) and "structures" in given:
        given = _from_structures(cast("dict[str, Any]", given))
        start = translation.format(given, "", 0, ())
    else:
        start = translation.format(_object(given, "format", ""), "/format", 0, ())
    return "\n".join([f"start: {start}", *translation.rules])


def _from_structures(given: dict[str, Any]) -> dict[str, Any]:
    """The format that the older form stands for."""
    tags: list[dict[str, Any]] = []
    for index, each in enumerate(_list(given, "structures", "")):
        path = f"/structures/{index}"
        schema: Any = cast("dict[str, Any]", each).get("schema") if isinstance(each, dict) else None
        tags.append(
            {
                "type": "tag",
                "begin": _field(each, "begin", str, path),
                "content": {"type": "json_schema", "json_schema": {} if schema is None else schema},
                "end": _field(each, "end", str, path),
            }
        )
    return {"type": "triggered_tags", "triggers": _list(given, "triggers", ""), "tags": tags}


class _Translation:
    """Translates one structural tag. Each method of a format returns the body of a rule."""

    def __init__(self, special: SpecialTokens, space: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self._special = special
        self._space = space
        self._num_parts = 0

    def format(self, given: Any, path: str, depth: int, ends: Sequence[str]) -> str:
        """Translate a format, and one of the texts that may follow it, `ends`. Empty: nothing follows it."""
        self._num_parts += 1
        if depth > MAX_DEPTH or self._num_parts > MAX_PARTS:
            what = f"nests formats more than {MAX_DEPTH} deep" if depth > MAX_DEPTH else f"has over {MAX_PARTS} formats"
            raise InvalidRequest(f"#{path}: the structural tag {what}")
        kind = _field(given, "type", str, path)
        translate = getattr(self, f"_{kind}", None) if re.fullmatch("[a-z_]+", kind) and kind in _TYPES else None
        if translate is None:
            raise InvalidRequest(f"#{path}/type: {kind!r} isn't one of {', '.join(sorted(_TYPES))}")
        if kind in _ENDED:
            return translate(given, path, depth, ends)
        body = translate(given, path, depth)
        return f"({body}) {self._one_of(ends)}" if ends else body

    # ---- formats that are nothing but themselves

    def _const_string(self, given: Any, path: str, depth: int) -> str:
        return self._text(_field(given, "value", str, path))

    def _json_schema(self, given: Any, path: str, depth: int) -> str:
        usuals: dict[str, Any] = {"style": "json", "any_order": False, "max_whitespace_cnt": None, "excludes": []}
        for name, usual in usuals.items():
            if given.get(name, usual) != usual:
                raise InvalidRequest(f"#{path}/{name}: {given[name]!r} can't be enforced: omit it")
        schema: Any = given.get("json_schema")
        if not isinstance(schema, (bool, dict)):
            raise InvalidRequest(f"#{path}/json_schema: a JSON schema is missing")
        try:
            reduced = enforceable(schema)
        except InvalidRequest as error:
            raise InvalidRequest(f"#{path}/json_schema{str(error).removeprefix('#')}") from error
        own: Any = reduced.get("x-guidance")
        return f"%json {json.dumps({**reduced, 'x-guidance': {**self._space, **(own or {})}})}"

    def _regex(self, given: Any, path: str, depth: int) -> str:
        return pattern_rule(_field(given, "pattern", str, path))

    def _grammar(self, given: Any, path: str, depth: int) -> str:
        from llguidance import grammar_from  # imported lazily: an optional package

        from raycore.parts.constraints.grammar.embedded import with_enforceable_schemas

        grammar = with_enforceable_schemas(_field(given, "grammar", str, path))
        return f"%lark {{\n{grammar_from('grammar', grammar).strip()}\n}}"

    def _token(self, given: Any, path: str, depth: int) -> str:
        token: Any = given.get("token")
        token_id = self._special.get(token) if isinstance(token, str) else token
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise InvalidRequest(f"#{path}/token: {token!r} is neither a token id nor the text of a special token")
        return f"<[{token_id}]>"

    def _or(self, given: Any, path: str, depth: int) -> str:
        return f"({' | '.join(self._each(given, 'elements', path, depth))})"

    def _optional(self, given: Any, path: str, depth: int) -> str:
        return f"{self._content(given, path, depth)}?"

    def _plus(self, given: Any, path: str, depth: int) -> str:
        return f"{self._content(given, path, depth)}+"

    def _star(self, given: Any, path: str, depth: int) -> str:
        return f"{self._content(given, path, depth)}*"

    def _repeat(self, given: Any, path: str, depth: int) -> str:
        least, most = _field(given, "min", int, path), _field(given, "max", int, path)
        if not (0 <= least <= MAX_REPEATS and (most == -1 or least <= most <= MAX_REPEATS)):
            raise InvalidRequest(f"#{path}: min={least} and max={most} aren't a range within [0, {MAX_REPEATS}]")
        return f"{self._content(given, path, depth)}{{{least},{'' if most == -1 else most}}}"

    def _tags_with_separator(self, given: Any, path: str, depth: int) -> str:
        separator, tags = _field(given, "separator", str, path), " | ".join(self._each(given, "tags", path, depth))
        rule = self._rule(tags)
        more = "" if given.get("stop_after_first") else f" ({self._text(separator)} {rule})*"
        return f"{rule}{more}" if given.get("at_least_one") else f"({rule}{more})?"

    def _tag(self, given: Any, path: str, depth: int) -> str:
        begin: Any = given.get("begin")
        begun = self._token(begin, f"{path}/begin", depth) if isinstance(begin, dict) else self._begin(given, path)
        return f"{begun} {self._inside(given, path, depth)}"

    # ---- formats with free text, which ends with one of the texts that follow

    def _sequence(self, given: Any, path: str, depth: int, ends: Sequence[str]) -> str:
        elements: list[Any] = _list(given, "elements", path)
        parts: list[str] = []
        index = 0
        while index < len(elements):
            where, element = f"{path}/elements/{index}", elements[index]
            is_last, index = index + 1 == len(elements), index + 1
            if is_last:
                parts.append(self.format(element, where, depth + 1, ends))
            elif not _has_free_end(element):
                parts.append(self.format(element, where, depth + 1, ()))
            else:
                # free text takes the next element's beginning along
                begin, rest = self._split(elements[index], f"{path}/elements/{index}", depth + 1)
                parts.append(self.format(element, where, depth + 1, [begin]))
                is_last, index = index + 1 == len(elements), index + 1
                parts.append(rest)
                if is_last:
                    parts.append(self._one_of(ends))
        return " ".join(filter(None, parts)) if elements else self._one_of(ends) or '""'

    def _any_text(self, given: Any, path: str, depth: int, ends: Sequence[str]) -> str:
        if given.get("max_tokens") is not None:
            raise InvalidRequest(f"#{path}/max_tokens can't be enforced: use max_chars")
        most: Any = given.get("max_chars")
        if most is not None and (not isinstance(most, int) or not 0 <= most <= MAX_REPEATS):
            raise InvalidRequest(f"#{path}/max_chars: {most!r} isn't an integer in [0, {MAX_REPEATS}]")
        text = ANY_TEXT if most is None else f"/(.|\\n){{0,{most}}}/"
        return self._until(ends, _strings(given, "excludes", path), text)

    def _triggered_tags(self, given: Any, path: str, depth: int, ends: Sequence[str]) -> str:
        triggers = _strings(given, "triggers", path)
        rules: list[tuple[str, list[str]]] = [(trigger, []) for trigger in triggers]
        for index, tag in enumerate(_list(given, "tags", path)):
            where = f"{path}/tags/{index}"
            begin = _field(tag, "begin", str, where)
            matching = [rests for trigger, rests in rules if begin.startswith(trigger)]
            if len(matching) != 1:
                raise InvalidRequest(f"#{where}/begin: {begin!r} begins with {len(matching)} triggers: it needs one")
            trigger = next(trigger for trigger, rests in rules if rests is matching[0])
            rest = self._text(begin[len(trigger) :]) if begin != trigger else ""
            matching[0].append(f"{rest} {self._inside(tag, where, depth + 1)}")
        return self._dispatched(given, path, [(trigger, " | ".join(rests)) for trigger, rests in rules if rests], ends)

    def _dispatch(self, given: Any, path: str, depth: int, ends: Sequence[str]) -> str:
        rules: list[tuple[str, str]] = []
        for index, rule in enumerate(_list(given, "rules", path)):
            where = f"{path}/rules/{index}"
            if not isinstance(rule, list) or len(cast("list[Any]", rule)) != 2 or not isinstance(rule[0], str):
                raise InvalidRequest(f"#{where}: {rule!r} isn't a pair of a string and a format")
            rules.append((rule[0], self.format(rule[1], f"{where}/1", depth + 1, ())))
        return self._dispatched({**given, "stop_after_first": not given.get("loop", True)}, path, rules, ends)

    # ---- parts of formats

    def _dispatched(self, given: Any, path: str, rules: Sequence[tuple[str, str]], ends: Sequence[str]) -> str:
        """Free text, in which what follows a trigger is given by a rule."""
        if not rules:
            raise InvalidRequest(f"#{path}: there is no tag")
        excludes = _strings(given, "excludes", path)
        triggers = [trigger for trigger, _ in rules]
        taken = [*triggers, *excludes]
        calls = [f"{self._lazy(trigger, excludes)} {self._rule(rest)}" for trigger, rest in rules]
        call = self._rule(" | ".join(calls))
        if given.get("stop_after_first"):
            after = self._one_of(ends)
            return f"{call} {after}" if given.get("at_least_one") else f"({call} {after} | {self._until(ends, taken)})"
        more = "+" if given.get("at_least_one") else "*"
        return f"{call}{more} {self._until(ends, taken)}"

    def _until(self, ends: Sequence[str], excludes: Sequence[str], text: str = ANY_TEXT) -> str:
        """Free text without `excludes`, then one of `ends`, if there are any."""
        if ends:
            return f"({' | '.join(self._lazy(end, excludes, text) for end in ends)})"
        return self._terminal(f"{text}{_without(excludes)}")

    def _lazy(self, end: str, excludes: Sequence[str], text: str = ANY_TEXT) -> str:
        """Free text without `excludes`, then `end`, which the text doesn't contain."""
        if not end:
            return self._terminal(f"{text}{_without(excludes)}")
        tokens = [token for token in self._special if token in end]
        others = [each for each in excludes if each not in self._special and not end.startswith(each)]
        if not tokens:
            name = self._name()
            self.rules.append(f"{name}[lazy]: {self._terminal(f'{text}{_without(others)}')} {json.dumps(end)}")
            return name
        first = min(tokens, key=end.index)
        if not end.startswith(first):
            raise InvalidRequest(f"{end!r} has the special token {first!r} after other text: begin with the token")
        # no text contains a special token
        return f"{self._terminal(f'{text}{_without(others)}')} {self._text(end)}"

    def _inside(self, tag: Any, path: str, depth: int) -> str:
        """A tag's content and end."""
        end: Any = tag.get("end")
        content = _object(tag, "content", path)
        if isinstance(end, dict):
            return f"{self.format(content, f'{path}/content', depth + 1, ())} {self._token(end, f'{path}/end', depth)}"
        ends: Any = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not ends or not all(isinstance(each, str) for each in cast("list[Any]", ends)):
            raise InvalidRequest(f"#{path}/end: {end!r} isn't a string or a list of strings")
        return self.format(content, f"{path}/content", depth + 1, cast("list[str]", ends) if ends != [""] else ())

    def _split(self, given: Any, path: str, depth: int) -> tuple[str, str]:
        """The text with which a format begins, and the body of the rest."""
        kind = _field(given, "type", str, path)
        if kind == "const_string":
            return _field(given, "value", str, path), ""
        if kind == "tag" and isinstance(given.get("begin"), str) and given["begin"]:
            return given["begin"], self._inside(given, path, depth)
        raise InvalidRequest(f"#{path}: free text before {kind!r} has no end: put a const_string or a tag after it")

    def _begin(self, tag: Any, path: str) -> str:
        begin = _field(tag, "begin", str, path)
        return self._text(begin) if begin else ""

    def _content(self, given: Any, path: str, depth: int) -> str:
        return f"({self.format(_object(given, 'content', path), f'{path}/content', depth + 1, ())})"

    def _each(self, given: Any, name: str, path: str, depth: int) -> list[str]:
        elements = _list(given, name, path)
        if not elements:
            raise InvalidRequest(f"#{path}/{name} is empty")
        return [self.format(each, f"{path}/{name}/{index}", depth + 1, ()) for index, each in enumerate(elements)]

    def _one_of(self, texts: Sequence[str]) -> str:
        bodies = [self._text(text) for text in texts]
        return bodies[0] if len(bodies) == 1 else f"({' | '.join(bodies)})" if bodies else ""

    def _text(self, text: str) -> str:
        """A text, in which special tokens are these tokens."""
        if not self._special or not text:
            return json.dumps(text)
        pattern = "|".join(re.escape(token) for token in sorted(self._special, key=len, reverse=True))
        parts = re.split(f"({pattern})", text)
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in parts if part
        )

    def _rule(self, body: str) -> str:
        name = self._name()
        self.rules.append(f"{name}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = self._name().upper()
        self.rules.append(f"{name}: {body}")
        return name

    def _name(self) -> str:
        return f"part_{len(self.rules)}"


_ENDED = ("sequence", "any_text", "triggered_tags", "dispatch")
"""The types whose methods translate what follows, too."""
_TYPES = (
    *_ENDED,
    *("const_string", "json_schema", "regex", "grammar", "token", "or", "optional", "plus", "star", "repeat"),
    *("tags_with_separator", "tag"),
)


def _has_free_end(given: Any) -> bool:
    """Whether a format may end with free text."""
    if not isinstance(given, dict):
        return False
    given = cast("dict[str, Any]", given)
    if given.get("type") in ("any_text", "triggered_tags", "dispatch"):
        return True
    elements: Any = given.get("elements")
    if given.get("type") == "sequence" and isinstance(elements, list) and elements:
        return _has_free_end(elements[-1])
    return False


def _without(excludes: Sequence[str]) -> str:
    """What a terminal's body needs to match only texts that contain none of these."""
    if not excludes:
        return ""
    pattern = pattern_of_choice(excludes).replace("\n", r"\n")
    return rf" & ~/(.|\n)*({pattern})(.|\n)*/"


def _strings(given: Any, name: str, path: str) -> list[str]:
    found: Any = given.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in cast("list[Any]", found)):
        raise InvalidRequest(f"#{path}/{name}: {found!r} isn't a list of non-empty strings")
    return cast("list[str]", found)


def _list(given: Any, name: str, path: str) -> list[Any]:
    return cast("list[Any]", _field(given, name, list, path))


def _object(given: Any, name: str, path: str) -> dict[str, Any]:
    return cast("dict[str, Any]", _field(given, name, dict, path))


def _field(given: Any, name: str, kind: Callable[..., T], path: str) -> T:
    """A field of an object, which must have this type."""
    value: Any = cast("dict[str, Any]", given).get(name) if isinstance(given, dict) else None
    if not isinstance(value, cast("type[T]", kind)) or isinstance(value, bool):
        shown = "is missing" if value is None else f"is {json.dumps(value)[:60]}"
        expected = {str: "a string", list: "a list", dict: "an object", int: "an integer"}[cast("Any", kind)]
        raise InvalidRequest(f"#{path}/{name} {shown}: give {expected}")
    return value
