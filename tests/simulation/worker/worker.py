"""`SimulatedWorker`: a worker for the option `worker_cls`, without torch. See `model` for what it computes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from raycore.activity import TAGS, MemoryTag
from raycore.cache_layout import KVCacheConfig, WorkerCacheSpec
from raycore.config import EngineConfig
from raycore.errors import InvalidInput
from raycore.lora.request import LoRARequest
from raycore.messages import Computation, GrammarOutput, StepPlan, StepResult
from raycore.rpc.pending import Pending
from raycore.structured_outputs import StructuredOutputsParams
from raycore.system import time
from raycore.worker.rank import MemoryNeed, Regrouping, WorkerRank
from simulation import mistakes
from simulation.worker import complaints, plans
from simulation.worker.cache import LAYER_BYTES, layers_of
from simulation.worker.chance import Chance, speed_of
from simulation.worker.experts import held_by
from simulation.worker.line import Line
from simulation.worker.meeting import LATE_S, Room, room_at
from simulation.worker.numbers64 import Words
from simulation.worker.pending import Launched
from simulation.worker.preparation import Adapters, Constraints
from simulation.worker.runner import WRONG_DRAFTS, Computed, Runner
from simulation.worker.states import ROW_BYTES
from simulation.worker.steps import note_step, note_vain_drafting
from simulation.worker.transfers import Transfers, with_report
from simulation.worker.weights import NamedNumbers, Weights

_MEMORY_BYTES = 64 * LAYER_BYTES
"""What there is for the KV cache, unless the configuration has a number of blocks."""
_STEP_S, _TOKEN_S, _DRAFT_S = 2e-3, 2e-5, 2e-4
_DRAFT_FACTORS = (1.0, 1.0, 30.0)
"""How slow the model that drafts may be: some is so slow that drafts never pay."""
_LOAD_S, _WARM_UP_S = 0.5, 0.1
_IS_NEW = "the worker has no weights yet: it gets them from those with which it will share experts"


class Begun(NamedTuple):
    """A step from which nothing has been sampled yet."""

    plan: StepPlan
    began_s: float
    begins_s: float
    """When all is computed that the step needs of others."""
    computed: Computed
    is_anyone_busy: bool

    @property
    def step(self) -> int:
        return self.plan.step


class SimulatedWorker:
    """One worker. Each of a rank computes the whole model, so that they needn't talk much: see `Line`."""

    def __init__(self, config: EngineConfig, rank: WorkerRank) -> None:
        self.config = config
        self.rank = rank
        self.load_progress = 0.0
        self._chance = Chance(f"worker {rank.label}")
        self._draft_s = _DRAFT_S * speed_of("drafting", _DRAFT_FACTORS)
        self._weights = Weights(self._chance)
        self._weights.hold(() if rank.is_new else self._held)
        self._adapters = Adapters(config.lora.num_adapters + 1 if config.lora.enable_lora else 0, self._chance)
        self._constraints = Constraints(self._chance)
        self._runner: Runner | None = None
        """None: the KV cache isn't allocated."""
        self._are_weights_asleep = False
        self._room: Room | None = None
        """Where this worker meets those of the ranks that it shares experts with. None: there are none."""
        self._line: Line | None = None
        """This worker's place among those of its rank. None: it is the only one."""
        self._transfers: Transfers | None = None
        """None: there is no KV connector, or no KV cache yet."""
        self._busy_until_s = 0.0
        """When the device has computed all steps that were launched."""

    # ---- start

    def init_device(self) -> None:
        """Meet the workers of ranks that share experts, and find the others of this rank."""
        if self.rank.world_size > 1:
            self._line = Line(self.rank, self.config.executor.init_timeout_s)
        parallel, address = self.config.parallel, self.rank.rendezvous
        if parallel.is_lockstep and not self.rank.is_new:
            assert address is not None, "ranks that share experts have a rendezvous"
            self._room = room_at(address, self.rank.worker, parallel.num_sharing)
            self._room.meet(self.rank.sharing_rank, None, self.config.executor.init_timeout_s)

    def load_model(self) -> None:
        self._chance.work(_LOAD_S)
        self._weights.read(self.config.model.model)
        self.load_progress = 1.0

    def get_kv_cache_spec(self) -> WorkerCacheSpec:
        return WorkerCacheSpec(layers_of(self.config), state_bytes=ROW_BYTES if self.config.state_rows else 0)

    def determine_available_memory(self) -> int:
        return _MEMORY_BYTES

    def initialize_cache(self, cache: KVCacheConfig) -> None:
        assert not self._are_weights_asleep, "the cache needs the weights"
        self._end_runner()
        self._runner = Runner(self.config, cache, self._adapters, self._chance)
        if self.config.kv_transfer_config is not None:
            if self._transfers is None:
                self._transfers = Transfers(self.config, cache, self.rank)
            self._transfers.register(self._runner.cache, self._runner.states)

    def warm_up(self) -> None:
        self._chance.work(_WARM_UP_S)

    def dtype_name(self) -> str:
        return "float32"

    def computation(self) -> Computation:
        return Computation("simulated")

    # ---- steps

    def execute_model(self, plan: StepPlan) -> StepResult | Pending[StepResult | None] | None:
        """Run one step. It takes as long as chance says, by its number of tokens."""
        with self._complaining(plan.step):
            return self._end(self._begin(plan), None)

    @contextmanager
    def _complaining(self, step: int) -> Generator[None, None, None]:
        """Note what is raised in a step."""
        try:
            yield
        except Exception as error:
            mistakes.note(error, f"{self.rank.label} fails in a step")
            complaints.fails(f"{self.rank.label} fails in step {step}: {type(error).__name__}: {error}")
            raise

    def _begin(self, plan: StepPlan) -> Begun:
        """Compute a step up to what tokens are sampled from."""
        plans.look(plan, self.rank.label)
        began_s = time.monotonic()
        begins_s = 0.0 if self._line is None else self._line.wait_for_others(plan)
        is_anyone_busy, weights = self._meet(plan)
        if self._transfers is not None:
            self._transfers.begin(plan)
        return Begun(plan, began_s, begins_s, self._running.compute(plan, weights), is_anyone_busy)

    def _end(self, begun: Begun, grammar: GrammarOutput | None) -> StepResult | Pending[StepResult | None] | None:
        """Sample."""
        plan = begun.plan
        result, receive = self._running.sample(begun.computed, grammar)
        result.is_anyone_busy = begun.is_anyone_busy
        report = None if self._transfers is None else self._transfers.report()
        own = with_report(plan, result if self.rank.reports_steps else None, report)
        took_s = self._chance.duration_s(_STEP_S + _TOKEN_S * plan.num_step_tokens) / self.rank.pp_size
        self._busy_until_s = max(self._busy_until_s, begun.begins_s, time.monotonic()) + took_s
        if plan.slots and self.rank.reports_steps:  # others don't talk to it, and may compute theirs later
            note_step(begun.began_s, self._busy_until_s)
        if self.config.max_steps_in_flight == 1:
            if took_s:
                time.sleep(took_s)
            receive()
            self._tell(plan, result, time.monotonic())
            return own
        self._tell(plan, result, self._busy_until_s)
        return Launched(own, self._busy_until_s, receive)

    def _tell(self, plan: StepPlan, result: StepResult, ready_s: float) -> None:
        """Tell the other workers of this rank that a step is computed."""
        if self._line is not None:
            self._line.tell(plan, result, self._running.last_sampled, ready_s)

    def _meet(self, plan: StepPlan) -> tuple[bool, Words]:
        """Meet the ranks that share experts. Returns whether any of them has tokens, and the weights of the step."""
        if self._room is None:
            return True, self._weights.parts
        own = bool(plan.slots), self._weights.checksum(), self._weights.experts
        timeout_s = self.config.executor.execute_timeout_s
        # ranks of one engine may be busy with a regrouping
        late_s = LATE_S if self.config.parallel.num_ranks_of_servers else None
        met = self._room.meet(self.rank.sharing_rank, own, timeout_s, late_s).values()
        is_anyone_busy = any(is_busy for is_busy, _, _ in met)
        checksums = {checksum for _, checksum, _ in met}
        if is_anyone_busy and len(checksums) > 1:
            complaints.disagrees(f"ranks with different experts share a step: {sorted(checksums)}")
        return is_anyone_busy, self._weights.with_experts(experts for _, _, experts in met)

    @property
    def _held(self) -> range:
        """The experts of this worker."""
        parallel = self.config.parallel
        return held_by(self.rank.sharing_rank, parallel.num_sharing) if parallel.is_lockstep else held_by(0, 1)

    def take_draft_token_ids(self, slots: list[int], num_tokens: list[int]) -> list[list[int]]:
        self._chance.work(self._draft_s * max(num_tokens))
        asked = self.config.speculative_config
        if self._draft_s > _STEP_S and asked is not None and asked.num_speculative_tokens_per_batch_size is None:
            note_vain_drafting()
        return [
            self._running.draft(slot, count, self._weights.parts, lambda: self._chance.is_so(WRONG_DRAFTS))
            for slot, count in zip(slots, num_tokens, strict=True)
        ]

    def prepare_grammars(self, asked: Mapping[int, StructuredOutputsParams], dropped: Sequence[int] = ()) -> list[int]:
        return self._constraints.prepare(asked, dropped)

    def prepare_adapters(
        self, asked: Mapping[int, LoRARequest], dropped: Sequence[int] = ()
    ) -> tuple[list[int], dict[int, str]]:
        return self._adapters.prepare(asked, dropped)

    def drop_adapters(self, slots: Sequence[int]) -> None:
        self._adapters.drop(slots)

    # ---- memory and weights

    def sleep(self, level: int, tags: Sequence[MemoryTag] = TAGS) -> None:
        if "kv_cache" in tags:
            self._end_runner()
        if "weights" in tags:
            assert self._runner is None, "the runner uses the weights"
            self._weights.sleep(level)
            self._are_weights_asleep = True

    def wake_up(self, tags: Sequence[MemoryTag] = TAGS, reads_weights: bool = True) -> None:
        if "weights" in tags and self._are_weights_asleep:
            self._weights.wake(self.config.model.model if reads_weights else None)
            self._are_weights_asleep = False

    def reload_weights(self) -> None:
        self._weights.read(self.config.model.model)

    def load_weights(self, weights: NamedNumbers) -> set[str]:
        self._check_can_change()
        return self._weights.load(weights)

    def start_weight_update(self, needs_all: bool = False) -> None:
        self._check_can_change()
        self._weights.start_update(needs_all=needs_all)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._weights.receive(update_info)

    def finish_weight_update(self) -> None:
        self._weights.finish_update()

    def cancel_weight_update(self) -> bool:
        return self._weights.cancel_update()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Nothing to connect: updates say which checkpoint the trainer has."""

    def shutdown_weight_transfer_engine(self) -> None:
        """Nothing to disconnect."""

    def reload_from(self, path: str) -> None:
        self._check_can_change()
        self._weights.reload_from(path)

    def export_weights(self) -> list[dict[str, Any]]:
        return self._weights.exported()

    def import_weights(self, pieces: list[dict[str, Any]]) -> None:
        self._weights.take_exported(pieces)

    def release_exported_weights(self) -> None:
        """Nothing was put elsewhere."""

    def break_after(self, num_parts: int) -> None:
        """Fail in the change of weights that comes after so many parts have changed."""
        self._weights.num_left = num_parts

    def weights_checksum(self) -> str:
        assert not self.rank.is_new, _IS_NEW
        return self._weights.checksum()

    @property
    def num_weight_changes(self) -> int:
        """How often a part of the weights has changed."""
        return self._weights.num_changes

    @property
    def lacks_weights(self) -> bool:
        """Whether an update has to bring all weights."""
        return self._weights.lacks_any

    # ---- what clients ask for

    def memory_need(self, num_ranks: int, num_local_workers: Sequence[int], num_blocks: int) -> MemoryNeed:
        return MemoryNeed(0, _MEMORY_BYTES)

    def regroup(self, regrouping: Regrouping) -> None:
        """Meet the workers of all ranks that stay, come or leave. Experts move, and a new one gets all else, too."""
        rank, timeout_s = self.rank, self.config.executor.init_timeout_s
        room = room_at(f"{regrouping.rendezvous} for a change", rank.worker, regrouping.num_involved)
        own = None if rank.is_new else (self._weights.exported(), self._weights.experts)
        met = room.meet(rank.dp_rank, own, timeout_s)
        before = [each for _, each in sorted(met.items()) if each is not None]
        if rank.is_new:
            self._weights.join(before[0][0])
        self.config = self.config.with_num_ranks(regrouping.num_ranks)
        self.rank = msgspec.structs.replace(rank, is_new=False, rendezvous=regrouping.rendezvous)
        if rank.dp_rank < regrouping.num_ranks:
            self._weights.take_experts(self._held, [experts for _, experts in before])
        is_member = self.config.parallel.is_lockstep and rank.dp_rank < regrouping.num_ranks
        self._room = room_at(regrouping.rendezvous, rank.worker, regrouping.num_ranks) if is_member else None

    def accompany_warm_up(self) -> None:
        """Nothing is computed to warm up."""

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> list[str]:
        return []

    def profile(self, is_start: bool = True, *_: object) -> None:
        """There is nothing to profile."""

    def apply_model(self, func: Callable[[Any], Any]) -> Any:
        return func(self)

    def check_health(self) -> None:
        """The simulated device never fails."""

    def get_kv_connector_handshake_metadata(self) -> bytes | None:
        assert self._transfers is not None, "kv_transfer_config comes first"
        return self._transfers.handshake()

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.shutdown()
            self._transfers = None
        self._runner = None

    def _check_can_change(self) -> None:
        assert not self.rank.is_new, _IS_NEW
        if (reason := self.config.model.spec.why_weights_stay) is not None:
            raise InvalidInput(reason)

    def _end_runner(self) -> None:
        if self._transfers is not None:
            self._transfers.release()
        self._runner = None

    @property
    def _running(self) -> Runner:
        assert self._runner is not None, "the KV cache isn't allocated"
        return self._runner
