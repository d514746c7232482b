"""The contract of what a request can be besides tokens in and tokens out.

A kind is a module of this package with a `KIND`. It draws plain data into a request (`Request.wants`, under the kind's
name), and what an engine needs for it into the engine's options. It makes parameters of the data, and judges by it.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raycore.llm import AsyncLLM
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from simulation.cluster.records import Record, Sequence
from simulation.scenario import Fault, Operation, Request
from simulation.worker.model import Shape
from simulation.worker.numbers64 import Words

if TYPE_CHECKING:
    from simulation.cluster.operations.contract import History

    Perform = Callable[[AsyncLLM, "Asked", Record], AsyncIterator[Any]]
    """Makes a request's call. Yields its outputs."""

VOCABULARY = 320
"""Of the demo model. The token 0 ends texts."""


_NUM_PLAIN = 300


def tokens_of(prompt: Iterable[tuple[int, int]]) -> list[int]:
    """The tokens of a prompt's parts."""
    return [1 + (text * 7919 + index * 31) % _NUM_PLAIN for text, count in prompt for index in range(count)]


async def generate(llm: AsyncLLM, asked: Asked, record: Record) -> AsyncIterator[Any]:
    """The call of most requests."""
    request = record.request
    params = SamplingParams(**asked.params)
    outputs = llm.generate(
        asked.prompt, params, record.request_id, request.priority, stream=request.is_stream, **asked.arguments
    )
    async for output in outputs:
        yield output


@dataclass
class Asked:
    """A request as its caller makes it, and what follows from it for the judge."""

    prompt: dict[str, Any]
    params: dict[str, Any]
    """Of `SamplingParams`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the call."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of the `EngineRequest` that the judge needs."""
    perform: Perform = generate
    is_cumulative: bool = True
    """Whether each output has all of the one before, and more."""
    is_delta: bool = False
    """Whether outputs have only what is new."""
    has_tokens: bool = True
    """Whether the request gets tokens at all."""
    can_fail: bool = False
    """Whether an abort by the engine is an error to its caller."""
    error: tuple[type[BaseException], str] | None = None
    """What the request fails by: the class, and what the message has. None: it doesn't."""


@dataclass(frozen=True)
class Seen:
    """A sequence of a request, as a judge looks at it."""

    record: Record
    index: int
    sequence: Sequence
    request: EngineRequest
    """As it follows from the scenario."""
    shape: Shape
    weights: list[Words]
    """For each token, and for what comes after the last one."""
    is_whole: bool
    """Whether it has ended by itself."""


class Kind:
    """Does nothing: kinds replace what they need."""

    name: str
    """Under which requests have the data, and of its column in the table of what has met which fault."""
    engine_share: float = 0.0
    """Of the engines whose requests can have it."""
    request_share: float = 0.35
    """Of the requests of these engines that are drawn to have it."""
    excludes: Collection[str] = ()
    """The names of kinds that no request has along with this one."""

    def options(self, draw: random.Random, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """What is drawn into an engine's options, so that its requests can have this. None: with these options, none
        can."""
        return {}

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> Any:
        """The data that a request has. None: it has none. Only asked in engines whose requests can have this."""
        return None

    def operations(self, draw: random.Random, requests: Iterable[Request]) -> list[Operation]:
        """What operators do besides, because some of these requests have this. Not asked where kinds are drawn
        together: see `cluster.kinds`."""
        return []

    def faults(self, draw: random.Random, requests: Iterable[Request], options: Mapping[str, Any]) -> list[Fault]:
        """What breaks besides. As `operations`."""
        return []

    def simpler(self, value: Any) -> Iterator[Any]:
        """Simpler data, to make a scenario smaller. That a request can do without is known."""
        return iter(())

    def is_of(self, request: Request, options: Mapping[str, Any]) -> bool:
        """Whether a request is of this kind."""
        return self.name in request.wants

    def waits_s(self, value: Any) -> float:
        """For how many seconds its caller lets it wait."""
        return 0.0

    def apply(self, value: Any, request: Request, asked: Asked) -> None:
        """Make of the data what the caller asks."""

    def sequence(self, value: Any, record: Record, index: int, request: EngineRequest) -> EngineRequest:
        """The request of one sequence, given what it would be without this."""
        return request

    def excuses(self, value: Any, record: Record, error: BaseException, history: History) -> bool:
        """Whether a request may fail so, in an engine that goes on."""
        return False

    def problems(self, value: Any, seen: Seen) -> Iterator[str]:
        """What is wrong with a sequence besides its tokens."""
        return iter(())

    def problems_at_end(self, value: Any, record: Record, history: History) -> Iterator[str]:
        """What is wrong with a request that has ended without an error or abort."""
        return iter(())
