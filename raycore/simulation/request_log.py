"""Reads the request log of `raycore serve --enable-log-requests --enable-log-outputs`.

A request's line has its number of prompt tokens, an output's line its number of tokens. Times are whole seconds: the
requests of a second are spread over it evenly, in their order. What prompts have in common isn't in the log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime

_LINE = re.compile(r"\w+ (\d\d-\d\d \d\d:\d\d:\d\d) raycore\.server\.request_log \[[^]]*\] request (\S+): (.*)")
_PROMPT = re.compile(r"(\d+) prompt tokens, ")
_OUTPUT = re.compile(r"output \d+ of (\d+) tokens ")
_HALF_A_YEAR_S, _YEAR_S = 183 * 86400, 365 * 86400


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
