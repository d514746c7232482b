"""What happens to an engine in one run: its options and nodes, requests, what operators do, and what breaks.

A seed makes a scenario, and a scenario is plain data: it can be kept in a file, and made smaller.
"""

from __future__ import annotations

from typing import Any, Literal, Union

import msgspec

from simulation.world.kernel import Pace


class Request(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A request of one caller."""

    at_s: float
    """Virtual seconds after the engine is up."""
    prompt: tuple[tuple[int, int], ...]
    """The prompt's parts, each (text, number of tokens): requests with equal first parts share a prefix."""
    max_tokens: int = 1
    n: int = 1
    seed: int | None = None
    """None: greedy."""
    priority: int = 0
    wants: dict[str, Any] = {}
    """What else it has, by the names of `cluster.kinds`."""
    is_stream: bool = True
    """Whether its caller takes each token as it comes."""
    abort_after_s: float | None = None
    """Seconds after which its caller leaves."""
    caller: int = 0
    """Which of the callers' event loops."""


Boundary = Literal["before it is sent", "sent", "received", "answered", "heard"]
"""The moments of a message at which an end makes a difference: sent and lost with the sender, received and unanswered,
answered and unheard."""
BOUNDARIES: tuple[Boundary, ...] = ("before it is sent", "sent", "received", "answered", "heard")


class Moment(msgspec.Struct, frozen=True, tag=True):
    """A virtual time after the engine is up."""

    at_s: float


class AtMessage(msgspec.Struct, frozen=True, tag=True):
    """The `number`-th time, from 1, that a message of this method comes to this boundary after the engine is up."""

    method: str
    boundary: Boundary
    number: int


class Operation(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What an operator does."""

    at_s: float
    kind: str
    """See `operations`."""
    arguments: dict[str, Any] = {}
    operator: int = 0
    """Which of the operators. Each does one thing after the other."""
    with_message: AtMessage | None = None
    """Once it is due, it comes at the same moment as this message, counted from then on."""
    places_later: int = 0
    """At which of the places that threads of its program come to then: see `World.come_between`. 0: at any."""


class AtShutdown(msgspec.Struct, frozen=True, tag=True):
    """When all callers and operators are done. The engine is shut down `wait_s` virtual seconds later."""

    wait_s: float


class Fault(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What breaks, and when."""

    when: Union[Moment, AtMessage, AtShutdown]  # noqa: UP007 - msgspec reads it, also in Python 3.10
    kind: str
    """A name of `faults.KINDS`."""
    target: int = 0
    """Which of the processes or nodes that the kind can strike."""
    for_s: float = 0.0
    """For how long, if it ends."""


class Scenario(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """All that a run depends on."""

    seed: int
    """What decides the order of threads, and how long everything takes."""
    options: dict[str, Any] = {}
    """Of the engine."""
    servers: tuple[dict[str, Any], ...] = ()
    """Options besides, of each of several programs that have engines of their own. Empty: there is one."""
    num_api_servers: int = 0
    """Processes that each have a client of the one engine, and that all requests come to. 0: the driver's own."""
    nodes: tuple[dict[str, float], ...] = ({"CPU": 8.0},)
    """The resources of each node. The driver is on the first one."""
    exports_metrics: bool = False
    """Whether Ray exports what the engine's program records."""
    late_calls: dict[str, float] = {}
    """See `Cluster.late_calls`."""
    requests: tuple[Request, ...] = ()
    operations: tuple[Operation, ...] = ()
    faults: tuple[Fault, ...] = ()
    pace: Pace | None = None
    """How the seed chooses. None: the seed decides that, too."""
    awaits_ranks: bool = False
    """Whether the engine goes on until all faults are over and its ranks serve again, and operators only undo what
    requests wait for. Otherwise it is shut down when all callers and operators are done."""
    start_error: str = ""
    """The type of the error by which the start has to fail. Empty: the engine starts."""
    at_statements: bool = False
    """Whether threads change between any two statements."""
    num_free_changes: int | None = None
    """How many changes of threads the seed may make where none is needed. None: any number."""


def to_json(scenario: Scenario) -> str:
    """A scenario as text, a line for each of its parts."""
    return msgspec.json.format(msgspec.json.encode(scenario), indent=1).decode()


def from_json(text: str | bytes) -> Scenario:
    """Raises msgspec.ValidationError, which names the place, if the text is no scenario."""
    return msgspec.json.decode(text, type=Scenario)
