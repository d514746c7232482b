"""What a worker computes with. Its parts share it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from raycore.config import EngineConfig
from raycore.hooks import overridden
from raycore.messages import GrammarOutput, StepPlan
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.worker.groups import WorkerGroups
from raycore.worker.memory_sizes import MemorySizes
from raycore.worker.part import WorkerPart
from raycore.worker.rank import WorkerRank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from raycore.parts.experts.parallel import ExpertParallel
    from raycore.runner.launched_step import LaunchedStep
    from raycore.runner.runner import ModelRunner
    from raycore.worker.setup import WorkerSetup
    from raycore.worker.worker_model import WorkerModel


class WorkerCore:
    """A worker's decisions, its model, and what runs steps, as they are now: none of it should be kept elsewhere."""

    setup: WorkerSetup
    """Set by `init_device`. Another one when the length of sequences or the number of ranks has changed."""
    model: WorkerModel
    """Set by `init_device`."""

    def __init__(self, config: EngineConfig, rank: WorkerRank) -> None:
        self.config = config
        self.rank = rank
        self.groups = WorkerGroups()
        self.hooks = WorkerHooks([])
        model = config.model
        self.grammars = GrammarCompiler(model.tokenizer, model.spec.vocab_size, model.spec.eos_token_ids)
        self.runner: ModelRunner | NoRunner = NoRunner()
        self.num_cache_groups = 1
        self.load_progress = 0.0
        """Fraction of the weights that has been read, 0 to 1. Any thread may read it."""
        self.lacks_weights = False
        """Whether the weights have no numbers: see `WorkerProtocol.wake_up`."""

    def take(self, setup: WorkerSetup) -> None:
        """Go on with other decisions."""
        self.setup, self.config, self.rank = setup, setup.config, setup.rank

    @property
    def sizes(self) -> MemorySizes:
        """The sizes of what the worker has."""
        return MemorySizes(self.setup, self.model.drafting)

    @property
    def has_cache(self) -> bool:
        """Whether there is a KV cache, and with it a model runner."""
        return not isinstance(self.runner, NoRunner)

    def end_runner(self) -> None:
        """Give up the model runner and the KV cache, if there are any."""
        for release_cache in self.hooks.release_cache:
            release_cache()
        self.runner.finish()
        self.runner = NoRunner()

    def before_change(self) -> None:
        """Say that layers or their weights are about to change."""
        for before_change in self.hooks.before_change:
            before_change()

    def tell_peers(self, error: BaseException) -> None:
        """Tell the workers that wait for this one that it has failed."""
        self.groups.fail(self.rank, error)


class WorkerHooks:
    """Those hooks that a worker's parts override, by the names of `WorkerPart`."""

    def __init__(self, parts: Iterable[WorkerPart]) -> None:
        parts = list(parts)
        self.prepare_cache = overridden(parts, WorkerPart.prepare_cache)
        self.around_attention = overridden(parts, WorkerPart.around_attention)
        self.runner_parts = overridden(parts, WorkerPart.runner_parts)
        self.heads = overridden(parts, WorkerPart.heads)
        self.acts_in_layers = overridden(parts, WorkerPart.acts_in_layers)
        self.warmed_up = overridden(parts, WorkerPart.warmed_up)
        self.begin = overridden(parts, WorkerPart.begin)
        """A part may put something before these that it does before the next step only."""
        self.end = overridden(parts, WorkerPart.end)
        self.before_change = overridden(parts, WorkerPart.before_change)
        self.release_cache = overridden(parts, WorkerPart.release_cache)
        self.fall_asleep = overridden(parts, WorkerPart.fall_asleep)
        self.wake = overridden(parts, WorkerPart.wake)
        self.regrouped = overridden(parts, WorkerPart.regrouped)
        self.complete = overridden(parts, WorkerPart.complete)
        self.shut_down = overridden(parts, WorkerPart.shut_down)


class NoRunner:
    """Stands for the model runner while there is no KV cache."""

    def launch(self, plan: StepPlan) -> NoReturn:
        """No step can run."""
        raise AssertionError("initialize_cache() comes first")

    def sample(self, launched: LaunchedStep, grammar: GrammarOutput | None) -> NoReturn:
        """No step has run."""
        raise AssertionError("initialize_cache() comes first")

    def execute(self, plan: StepPlan) -> NoReturn:
        """No step can run."""
        self.launch(plan)

    def take_draft_token_ids(self, slots: list[int], num_tokens: list[int]) -> NoReturn:
        """Nothing can be drafted."""
        raise AssertionError("initialize_cache() comes first")

    def share_experts(self, experts: ExpertParallel) -> None:
        """Do nothing: the next runner finds them itself."""

    def run_alone(self) -> None:
        """Do nothing: the next runner finds no others."""

    def finish(self) -> None:
        """Do nothing: no step has run."""
