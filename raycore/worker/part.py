"""The contract between a worker and what it can do besides loading a model and running steps.

Sleep, updates of weights, adapters, grammars, transfers of the KV cache, profiles and the moves of experts are parts. A
part overrides some of the hooks of `WorkerPart`, whose own methods do nothing. The worker binds these once, so a step
costs nothing for parts that have nothing to do in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from raycore.activity import MemoryTag
from raycore.cache_layout import KVCacheConfig
from raycore.config import EngineConfig
from raycore.messages import Computation, StepPlan, StepResult
from raycore.rpc.pending import Pending

if TYPE_CHECKING:
    from torch import Tensor

    from raycore.attention.spec import Attention
    from raycore.runner.heads import Head
    from raycore.runner.part import RunnerPart
    from raycore.step.device_batch import DeviceBatch
    from raycore.worker.core import WorkerCore

CalledT = TypeVar("CalledT", bound=Callable[..., Any])
WorkerT = TypeVar("WorkerT")


class WorkerPart:
    """What a worker can do. All hooks are called on the worker's thread, in the order of `Worker`'s list of parts.

    `init_device` makes the parts, before it chooses a device. A part that has waited for other workers and fails tells
    them so: see `fails_together`.
    """

    option: ClassVar[str] = ""
    """What an engine has to be started with for the part. Empty: every worker has it."""

    def __init__(self, core: WorkerCore) -> None:
        """`core`: what the worker computes with. It has a setup and a model as soon as a hook is called."""
        self.core = core

    @classmethod
    def is_needed(cls, config: EngineConfig) -> bool:
        """Whether the workers of this engine have the part."""
        return True

    def tell_peers(self, error: BaseException) -> None:
        """Tell the workers that wait for this one that it has failed."""
        self.core.tell_peers(error)

    # ---- the cache

    def prepare_cache(self, cache: KVCacheConfig) -> None:
        """Prepare for a KV cache of this size, which is allocated next, with the runner. Again whenever it wakes."""

    def around_attention(
        self, attention: Attention, blocks: list[Tensor], num_blocks: int, states: Sequence[Tensor]
    ) -> Attention:
        """Return what computes attention in steps, which may do more than `attention`.

        Args:
            blocks: the memory of the cache that has just been allocated, by layer.
            num_blocks: the number of its blocks.
            states: the memory of layers that keep states, each [layers, rows, ...]. Empty: there are none.
        """
        return attention

    def runner_parts(self) -> Sequence[RunnerPart]:
        """Return what takes part in the steps of the runner, which is being made."""
        return ()

    def heads(self, batch: DeviceBatch) -> Sequence[Head]:
        """Return what ends the steps of the last stage instead of sampling, if the part does: one head.

        `batch`: what the runner that is being made keeps of requests.
        """
        return ()

    def acts_in_layers(self) -> bool:
        """Whether the part does something between a step's layers, which a CUDA graph couldn't do again."""
        return False

    def warmed_up(self) -> None:
        """Finish one-time work: the first request may come."""

    def release_cache(self) -> None:
        """Let go of the cache, which is given up next. There may be none."""

    # ---- steps

    def begin(self, plan: StepPlan) -> None:
        """Prepare for a step, before it is launched. Not called in warm-ups."""

    def end(self, plan: StepPlan, step: Pending[StepResult | None]) -> Pending[StepResult | None]:
        """Return the step that was launched, with what there is to report in its result."""
        return step

    # ---- weights

    def before_change(self) -> None:
        """Let go of the model's layers: they, or their weights, change next."""

    def fall_asleep(self, level: int, tags: Sequence[MemoryTag]) -> None:
        """Give up memory: see `WorkerProtocol.sleep`. The runner and the cache are gone if they are meant."""

    def wake(self, tags: Sequence[MemoryTag], reads_weights: bool) -> None:
        """Get memory back: see `WorkerProtocol.wake_up`."""

    def regrouped(self) -> None:
        """Other workers share experts with this one from now on, so that it has others itself."""

    # ---- the rest

    def complete(self, computation: Computation) -> Computation:
        """Return what computes the model, with what the part knows of it."""
        return computation

    def shut_down(self) -> None:
        """End what the part has begun. Idempotent, and the last call."""


def called_by_name(method: CalledT) -> CalledT:
    """Mark a part's method, or what a property reads, as one that the worker has, too: see `has_parts`."""
    vars(method)["is_called_by_name"] = True
    return method


def calls_of(part: type[WorkerPart]) -> list[str]:
    """Return the names of the part's methods and properties that the worker has, too."""
    return [
        name
        for name, value in vars(part).items()
        if getattr(value.fget if isinstance(value, property) else value, "is_called_by_name", False)
    ]


def has_parts(parts: Sequence[type[WorkerPart]]) -> Callable[[type[WorkerT]], type[WorkerT]]:
    """Decorate a class of workers that have these parts: it gets their methods that are `called_by_name` as its own.

    `collective_rpc` then finds them, and subclasses may override them and call `super()`. They have the signatures and
    docstrings of the parts.
    """

    def decorate(worker: type[WorkerT]) -> type[WorkerT]:
        for part in parts:
            for name in calls_of(part):
                setattr(worker, name, _forwarded(part, name))
        return worker

    return decorate


def _forwarded(part: type[WorkerPart], name: str) -> Any:
    own = vars(part)[name]
    if isinstance(own, property):
        return property(lambda worker: getattr(worker._part(part, name), name), doc=own.__doc__)

    @wraps(own)
    def call(worker: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(worker._part(part, name), name)(*args, **kwargs)

    return call
