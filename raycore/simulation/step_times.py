"""How long a step takes, by what it computes: interpolated from a grid of measured steps.

`raycore bench step-times` writes the grid. What lies outside of it is extrapolated along a line, and said once.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from raycore.cache_layout import KVCacheConfig
from raycore.errors import InvalidInput

logger = logging.getLogger(__name__)

FORMAT = 1


class StepShape(NamedTuple):
    """What a step computes."""

    prompt_tokens: int
    """Tokens of chunks of more than one token."""
    num_prompts: int
    """Number of these chunks."""
    prompt_context: float
    """Mean number of tokens before a chunk, weighted by the chunks' tokens."""
    num_decodes: int
    """Sequences with one token."""
    decode_context: float
    """Mean number of tokens of these sequences."""


def shape_of(counts: NDArray[np.int64], computed: NDArray[np.int64]) -> StepShape:
    """The shape of a step.

    Args:
        counts: int64[n], how many tokens of each sequence it computes.
        computed: int64[n], how many tokens of each have been computed after it.
    """
    is_decode = counts == 1
    chunks, decodes = counts[~is_decode], computed[is_decode]
    num_tokens = int(chunks.sum())
    before = float(((computed[~is_decode] - chunks) * chunks).sum()) / max(1, num_tokens)
    return StepShape(num_tokens, len(chunks), before, len(decodes), int(decodes.sum()) / max(1, len(decodes)))


class StepTimes(Protocol):
    """Knows how long steps take."""

    def step_s(self, shape: StepShape) -> float:
        """Seconds that the device takes for a step."""
        ...

    def decodes_s(self, num_decodes: int, contexts: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for steps of `num_decodes` decodes with these mean numbers of tokens, float64[k]."""
        ...

    def engine_s(self, num_sequences: int, num_new: int = 0) -> float:
        """Seconds that the engine takes around a step, in which the device may be idle. `num_new`: requests begin."""
        ...


class Grid(msgspec.Struct, frozen=True):
    """Measured steps. `seconds[i][j][k]` is that with `prompt_tokens[i]`, `decodes[j]` and `context[k]`."""

    prompt_tokens: list[int]
    """Tokens of prompts in the step, from 0 on."""
    decodes: list[int]
    """Decoding sequences, from 0 on."""
    context: list[int]
    """Tokens of each of these sequences."""
    seconds: list[list[list[float | None]]]
    """None where nothing is computed."""


class Line(msgspec.Struct, frozen=True):
    """A function of one number, measured at some points."""

    at: list[float]
    """Ascending."""
    values: list[float]

    def __call__(self, x: float) -> float:
        """The value at `x`, along a line between its neighbors."""
        if len(self.at) == 1:
            return self.values[0]
        i, share = _place(self.at, x)
        return self.values[i] + (self.values[i + 1] - self.values[i]) * share


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What `raycore bench step-times` writes, as JSON."""

    format: int
    model: str
    hardware: str
    versions: str
    dtype: str
    options: dict[str, Any]
    """The engine's options."""
    max_steps_in_flight: int
    cache: KVCacheConfig
    """The KV cache of the measured engine."""
    num_blocks_in_memory: int | None
    """How many of its blocks there is memory for. None: as many as it has."""
    grid: Grid
    after_context_s: Line
    """Seconds that each token of a prompt's chunk takes more, by the number of tokens before the chunk."""
    per_prompt_s: float
    """How much longer a step takes for each prompt after the first one, with as many tokens."""
    engine: Line
    """Seconds of the engine around a step, by the number of sequences."""
    engine_per_request_s: float
    """Seconds of the engine for each request, from its arrival to its end, besides those of steps."""


class MeasuredTimes:
    """Step times from a measurement."""

    def __init__(self, measurement: Measurement, name: str = "the measurement") -> None:
        """`name`: how the log calls the measurement."""
        self.measurement = measurement
        self._name = name
        grid = measurement.grid
        self._prompts, self._decodes, self._context = grid.prompt_tokens, grid.decodes, grid.context
        self._contexts = np.array(grid.context, np.float64)
        self._seconds = _completed(grid)
        self._each: list[list[list[float]]] = self._seconds.tolist()
        """The same as plain numbers: one step is looked up in less time there."""
        self._told: set[str] = set()

    def step_s(self, shape: StepShape) -> float:
        """See `StepTimes`."""
        self._check("decoding sequences", shape.num_decodes, self._decodes)
        if shape.num_decodes:
            self._check("tokens of a sequence", shape.decode_context, self._context)
        if not shape.prompt_tokens:
            return max(0.0, self._interpolated(0, 0.0, shape))
        self._check("tokens of prompts", shape.prompt_tokens, self._prompts)
        time_s = self._interpolated(*_place(self._prompts, shape.prompt_tokens), shape)
        after = self.measurement.after_context_s
        if shape.prompt_context:
            self._check("tokens before a prompt's chunk", shape.prompt_context, after.at)
            time_s += shape.prompt_tokens * max(0.0, after(shape.prompt_context))
        return max(0.0, time_s) + self.measurement.per_prompt_s * (shape.num_prompts - 1)

    def decodes_s(self, num_decodes: int, contexts: NDArray[np.float64]) -> NDArray[np.float64]:
        """See `StepTimes`."""
        self._check("decoding sequences", num_decodes, self._decodes)
        if len(contexts):
            self._check("tokens of a sequence", float(contexts[-1]), self._context)
        return np.maximum(0.0, self._along_context(self._along_decodes(0, num_decodes), contexts))

    def engine_s(self, num_sequences: int, num_new: int = 0) -> float:
        """See `StepTimes`."""
        return max(0.0, self.measurement.engine(num_sequences)) + num_new * self.measurement.engine_per_request_s

    def _interpolated(self, i: int, of_prompts: float, shape: StepShape) -> float:
        """The time of a shape's decodes, and this far from `prompt_tokens[i]` to the next point."""
        j, of_decodes = _place(self._decodes, shape.num_decodes)

        def at(k: int, i: int = i, of_prompts: float = of_prompts) -> float:
            time_s = self._each[i][j][k] * (1 - of_decodes) + self._each[i][j + 1][k] * of_decodes
            return time_s if not of_prompts else time_s * (1 - of_prompts) + at(k, i + 1, 0.0) * of_prompts

        if not shape.num_decodes or len(self._context) == 1:
            return at(0)
        k, of_context = _place(self._context, shape.decode_context)
        before = at(k)
        return before + (at(k + 1) - before) * of_context

    def _along_decodes(self, i: int, num_decodes: int) -> NDArray[np.float64]:
        """By context: the time with `prompt_tokens[i]` and so many decodes."""
        j, share = _place(self._decodes, num_decodes)
        return self._seconds[i, j] * (1 - share) + self._seconds[i, j + 1] * share

    def _along_context(self, row: NDArray[np.float64], contexts: NDArray[np.float64]) -> NDArray[np.float64]:
        if len(self._context) == 1:
            return np.full(len(contexts), row[0])
        at = self._contexts
        k = np.minimum(np.maximum(np.searchsorted(at, contexts, "right") - 1, 0), len(at) - 2)
        share = (contexts - at[k]) / (at[k + 1] - at[k])
        return row[k] + (row[k + 1] - row[k]) * share

    def _check(self, what: str, value: float, at: Sequence[float]) -> None:
        """Log once that a value is larger than all of the grid. Values below the grid are near its first point."""
        if value > at[-1] and what not in self._told:
            self._told.add(what)
            logger.warning(
                "%s has at most %d %s, and a step has %d: its time is extrapolated", self._name, at[-1], what, value
            )


def read_step_times(path: str | Path) -> MeasuredTimes:
    """Read what `raycore bench step-times` has written.

    Raises:
        InvalidInput: the file can't be read, or isn't such a file. The message names the field.
    """
    try:
        measurement = msgspec.json.decode(Path(path).read_bytes(), type=Measurement)
    except OSError as error:
        raise InvalidInput(f"--step-times {path} can't be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise InvalidInput(f"--step-times {path} isn't what raycore bench step-times writes: {error}") from error
    if measurement.format != FORMAT:
        raise InvalidInput(f"--step-times {path} has the format {measurement.format}, and this raycore reads {FORMAT}")
    _check_grid(path, measurement.grid)
    return MeasuredTimes(measurement, str(path))


def as_json(measurement: Measurement) -> str:
    """The text of a file that `read_step_times` reads."""
    return json.dumps(msgspec.to_builtins(measurement), indent=1)


def _check_grid(path: str | Path, grid: Grid) -> None:
    for name in ("prompt_tokens", "decodes", "context"):
        values = cast("list[int]", getattr(grid, name))
        least = 1 if name == "context" else 2
        if len(values) < least or values != sorted(set(values)) or (name != "context" and values[0] != 0):
            raise InvalidInput(
                f"--step-times {path}: grid.{name}={values} isn't ascending from 0, with {least} or more"
            )
    sizes = [len(grid.decodes), len(grid.context)]
    if len(grid.seconds) != len(grid.prompt_tokens) or any(
        len(plane) != sizes[0] or any(len(row) != sizes[1] for row in plane) for plane in grid.seconds
    ):
        raise InvalidInput(f"--step-times {path}: grid.seconds doesn't have a number for each point of the grid")


def _completed(grid: Grid) -> NDArray[np.float64]:
    """The seconds of the grid. A step of nothing takes what is left where the first line of prompts meets 0."""
    seconds = np.array(
        [[[np.nan if value is None else value for value in row] for row in plane] for plane in grid.seconds], np.float64
    )
    is_missing = np.isnan(seconds)
    is_missing[0, 0] = False
    if is_missing.any():
        i, j, k = (int(index[0]) for index in is_missing.nonzero())
        raise InvalidInput(
            f"grid.seconds has no time for {grid.prompt_tokens[i]} tokens of prompts, {grid.decodes[j]} decodes and a "
            f"context of {grid.context[k]}"
        )
    if np.isnan(seconds[0, 0]).any():
        at = grid.prompt_tokens
        if len(at) > 2:
            first, second = seconds[1, 0], seconds[2, 0]
            seconds[0, 0] = np.maximum(0.0, first - (second - first) * at[1] / (at[2] - at[1]))
        else:
            seconds[0, 0] = seconds[1, 0]
    return seconds


def _place(at: Sequence[float], x: float) -> tuple[int, float]:
    """Where `x` lies: the index of the point before it, and how far from there to the next one it is.

    Beyond the ends, it is less than 0 or more than 1 of the last distance.
    """
    i = min(max(bisect_right(at, x) - 1, 0), len(at) - 2)
    return i, (x - at[i]) / (at[i + 1] - at[i])
