"""A rank's executor without workers, and requests for an engine that has it."""

from __future__ import annotations

import msgspec
import numpy as np

from raycore.cache_layout import LayerCacheSpec, WorkerCacheSpec
from raycore.config import EngineConfig
from raycore.engine.core import EngineCore
from raycore.messages import EngineRequest, StepPlan, StepResult
from raycore.sampling_params import SamplingParams

TOKEN = 5


class FakeExecutor:
    """One worker whose model always says `TOKEN`."""

    takes_masks = False

    def __init__(self, available: int = 1 << 20, max_concurrent_batches: int = 1):
        self.max_concurrent_batches = max_concurrent_batches
        self.available = available
        self.plans: list[StepPlan] = []
        self.most_in_flight = 0
        self.in_flight = 0
        self.fail_with: BaseException | None = None
        self.is_shut_down = False
        self.missing: dict[int, int] = {}
        self.memory_calls: list[tuple[object, ...]] = []
        """The calls that give up memory or allocate it, since the start."""

    def initialize(self, rendezvous=None, *, is_new=False):
        if self.fail_with:
            raise self.fail_with

    def determine_available_memory(self):
        return [1 << 30, self.available, self.available]

    def get_kv_cache_specs(self):
        return [WorkerCacheSpec((LayerCacheSpec("full", size),)) for size in (2048, 1024, 512)]

    def initialize_cache(self, cache):
        self.num_blocks = cache.num_blocks
        self.memory_calls.append(("initialize_cache", cache.num_blocks))

    def workers_answer(self):
        return True

    def sleep(self, level, tags):
        self.memory_calls.append(("sleep", level, tuple(tags)))

    def wake_up(self, tags, *, reads_weights=True):
        self.memory_calls.append(("wake_up", tuple(tags), *([] if reads_weights else ["reads no weights"])))

    def execute(self, plan):
        if self.fail_with:
            raise self.fail_with
        self.plans.append(plan)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return _Pending(self, plan)

    def result(self, plan: StepPlan) -> StepResult:
        self.in_flight -= 1
        for request in plan.new_requests:
            self.missing[request.slot] = len(request.token_ids) // 4 - request.num_computed_tokens
        slots = np.frombuffer(plan.slots, np.int32)
        counts = np.frombuffer(plan.num_tokens, np.int32) if plan.num_tokens else np.ones(len(slots), np.int32)
        num_sampled = []
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            num_missing = self.missing[slot] - count
            num_sampled.append(int(num_missing <= 0))
            self.missing[slot] = max(num_missing, 1)
        return StepResult(
            plan.step,
            np.full(sum(num_sampled), TOKEN, np.int32).tobytes(),
            np.array(num_sampled, np.int32).tobytes(),
        )

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [(method, args)]

    def check_health(self):
        pass

    def shutdown(self):
        self.is_shut_down = True


class _Pending:
    def __init__(self, executor, plan):
        self.executor, self.plan = executor, plan

    def result(self, timeout=None):
        return self.executor.result(self.plan)


def request(seq_id: int, prompt: int = 4, max_tokens: int = 3) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(seq_id, f"request-{seq_id}", list(range(1, prompt + 1)), params, seed=0)


def with_stages(config: EngineConfig, num_stages: int) -> EngineConfig:
    parallel = msgspec.structs.replace(config.parallel, pipeline_parallel_size=num_stages)
    return msgspec.structs.replace(config, parallel=parallel)


def run_to_end(core: EngineCore) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for _ in range(1000):
        if not core.has_work():
            return tokens
        outputs = core.step()
        if outputs is not None:
            for seq_id, token in zip(outputs.seq_ids.tolist(), outputs.token_ids.tolist(), strict=True):
                tokens.setdefault(seq_id, []).append(token)
    raise AssertionError("the engine never ran out of work")
