"""Reads traces of requests: when each came, how long its prompt and its output were, and what prompts have in common.

Formats, which are told apart by what is in the file:

* `mooncake`: JSON lines with `timestamp` (ms), `input_length`, `output_length` and maybe `hash_ids`, the numbers of the
  prompt's blocks of 512 tokens: equal numbers are equal tokens after equal beginnings.
* `azure`: CSV with the columns `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`.
* `raycore`: the log of `raycore serve --enable-log-requests --enable-log-outputs`. A request's line has its number of
  prompt tokens, an output's line its number of tokens. Times are whole seconds: the requests of a second are spread
  over it evenly, in their order. What prompts have in common isn't in the log.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from raycore.errors import InvalidInput
from raycore.json_fields import shortened

BLOCK_TOKENS = 512
"""Tokens of the block that a hash id stands for."""

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_LINE = re.compile(r"\w+ (\d\d-\d\d \d\d:\d\d:\d\d) raycore\.server\.request_log \[[^]]*\] request (\S+): (.*)")
_PROMPT = re.compile(r"(\d+) prompt tokens, ")
_OUTPUT = re.compile(r"output \d+ of (\d+) tokens ")
_HALF_A_YEAR_S, _YEAR_S = 183 * 86400, 365 * 86400


class InvalidTrace(InvalidInput):
    """A trace can't be read. The message names the file, the line and the value."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request of a trace."""

    arrival_s: float
    """Seconds since the first request of the trace."""
    num_prompt: int
    """Tokens of the prompt, at least 1."""
    num_output: int
    """Tokens of the output, at least 1."""
    hash_ids: tuple[int, ...] = ()
    """Numbers of the prompt's blocks. Empty: it has nothing in common with others."""


def read_trace(path: str | Path, kind: str = "auto") -> list[TracedRequest]:
    """Read a trace, in the order of arrival. The first request comes at 0 s.

    Args:
        kind: a key of `FORMATS`, or `auto`.

    Raises:
        InvalidTrace: the file can't be read, has no requests, or a line is invalid.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidTrace(f"--trace {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidTrace(f"--trace {path} isn't UTF-8: {error.reason} at byte {error.start}") from error
    kind = _kind_of(lines) if kind == "auto" else kind
    try:
        found = sorted(FORMATS[kind](lines), key=lambda each: each.arrival_s)
    except InvalidTrace as error:
        raise InvalidTrace(f"{path}, {error}") from None
    if not found:
        raise InvalidTrace(f"{path} has no requests in the format {kind!r}")
    first_s = found[0].arrival_s
    return [TracedRequest(each.arrival_s - first_s, each.num_prompt, each.num_output, each.hash_ids) for each in found]


def _kind_of(lines: Sequence[str]) -> str:
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip("\ufeff").lstrip().startswith("{"):
        return "mooncake"
    return "azure" if _AZURE_COLUMNS[0] in first and "," in first else "raycore"


def _mooncake(lines: Iterable[str]) -> Iterator[TracedRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line.lstrip("\ufeff"))
        except ValueError:
            raise InvalidTrace(f"line {number}: {shortened(line)} isn't JSON") from None
        if not isinstance(entry, dict):
            raise InvalidTrace(f"line {number}: {shortened(line)} isn't an object")
        fields = cast("dict[str, Any]", entry)
        arrival_ms = _number(number, "timestamp", _field(number, fields, "timestamp"))
        num_prompt = _count(number, "input_length", _field(number, fields, "input_length"))
        num_output = _count(number, "output_length", _field(number, fields, "output_length"))
        yield TracedRequest(arrival_ms / 1e3, num_prompt, num_output, _hash_ids(number, fields, num_prompt))


def _hash_ids(number: int, fields: dict[str, Any], num_prompt: int) -> tuple[int, ...]:
    given: Any = fields.get("hash_ids") or []
    if not isinstance(given, list) or not all(type(each) is int and each >= 0 for each in cast("list[Any]", given)):
        raise InvalidTrace(
            f"line {number}: hash_ids={shortened(cast('object', given))} isn't a list of numbers from 0 on"
        )
    ids = cast("list[int]", given)
    if ids and len(ids) * BLOCK_TOKENS < num_prompt:
        raise InvalidTrace(
            f"line {number}: hash_ids has {len(ids)} blocks of {BLOCK_TOKENS} tokens, less than "
            f"input_length={num_prompt}"
        )
    return tuple(ids)


def _azure(lines: Iterable[str]) -> Iterator[TracedRequest]:
    rows = csv.reader(lines)
    first = next(rows, list[str]())
    header = [name.strip().lstrip("\ufeff") for name in first]
    missing = [name for name in _AZURE_COLUMNS if name not in header]
    if missing:
        raise InvalidTrace(f"line 1: there is no column {missing[0]!r}, only {', '.join(header)}")
    places = [header.index(name) for name in _AZURE_COLUMNS]
    for row in rows:
        number = rows.line_num
        if not row:
            continue
        if len(row) < len(header):
            raise InvalidTrace(f"line {number}: {len(row)} columns instead of {len(header)}: {shortened(row)}")
        time, prompt, output = (row[place].strip() for place in places)
        num_prompt, num_output = _count(number, "ContextTokens", prompt), _count(number, "GeneratedTokens", output)
        yield TracedRequest(_time_s(number, time), num_prompt, num_output)


def _time_s(number: int, text: str) -> float:
    """Seconds of a time such as `2023-11-16 18:15:46.6805900`, which has more digits than Python reads."""
    whole, _, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    zone = rest[len(digits) :]
    try:
        return datetime.fromisoformat(whole + zone.replace("Z", "+00:00")).timestamp() + float(f"0.{digits or 0}")
    except ValueError:
        raise InvalidTrace(f"line {number}: TIMESTAMP={text!r} isn't a time such as 2023-11-16 18:15:46.68") from None


def _raycore(lines: Iterable[str]) -> Iterator[TracedRequest]:
    for number, arrival_s, num_prompt, num_output in logged_requests(lines):
        if num_prompt is None:
            raise InvalidTrace(
                f"line {number}: the log says nothing of the prompt's length: it needs lines such as "
                "'request ID: 12 prompt tokens, SamplingParams(…)', which raycore serve --enable-log-requests writes"
            )
        if num_output is None:
            raise InvalidTrace(
                f"line {number}: the log says nothing of the output's length: use --enable-log-outputs, too"
            )
        if num_output:
            yield TracedRequest(arrival_s, num_prompt, num_output)


FORMATS: dict[str, Callable[[Sequence[str]], Iterator[TracedRequest]]] = {
    "mooncake": _mooncake,
    "azure": _azure,
    "raycore": _raycore,
}
"""By name: what reads the lines of a file."""


def _field(number: int, fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise InvalidTrace(f"line {number}: there is no {name}, only {', '.join(fields) or 'nothing'}")
    return fields[name]


def _number(number: int, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
        raise InvalidTrace(f"line {number}: {name}={shortened(value)} isn't a number")
    return float(value)


def _count(number: int, name: str, value: Any) -> int:
    try:
        count = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else 0
    except ValueError:
        count = 0
    if count < 1:
        raise InvalidTrace(f"line {number}: {name}={shortened(value)} isn't a positive integer")
    return count


def faster(trace: Iterable[TracedRequest], factor: float) -> list[TracedRequest]:
    """The same requests, which come `factor` times as fast."""
    return [TracedRequest(each.arrival_s / factor, each.num_prompt, each.num_output, each.hash_ids) for each in trace]


def logged_requests(lines: Iterable[str]) -> Iterator[tuple[int, float, int | None, int | None]]:
    """Yield (line, arrival in seconds, prompt tokens, output tokens) of each request that the log has.

    Lengths that the log doesn't have are None. The tokens of a request's several outputs are added up.
    """
    seconds: list[tuple[int, float, str, int | None]] = []
    outputs: Counter[str] = Counter()
    added_s = last_s = 0.0
    for number, line in enumerate(lines, start=1):
        found = _LINE.match(line)
        if found is None:
            continue
        time, request_id, rest = found.groups()
        if (output := _OUTPUT.match(rest)) is not None:
            outputs[request_id] += int(output[1])
        elif not rest.startswith(("output ", "part ", "prompt ")):
            # lines have no year: a leap year has all days
            time_s = datetime.strptime(f"2000-{time}", "%Y-%m-%d %H:%M:%S").timestamp()
            if time_s + added_s < last_s - _HALF_A_YEAR_S:
                added_s += _YEAR_S
            last_s = time_s + added_s
            prompt = _PROMPT.match(rest)
            seconds.append((number, last_s, request_id, None if prompt is None else int(prompt[1])))
    in_second, seen = Counter(second_s for _, second_s, _, _ in seconds), Counter[float]()
    lengths = dict(outputs)
    for number, second_s, request_id, num_prompt in seconds:
        arrival_s = second_s + seen[second_s] / in_second[second_s]
        seen[second_s] += 1
        yield number, arrival_s, num_prompt, lengths.get(request_id)
