"""A worker's side of the KV connector in the course of steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from raycore.attention.spec import Attention
from raycore.cache_layout import KVCacheConfig, WorkerCacheSpec
from raycore.config import EngineConfig
from raycore.errors import InvalidConfig
from raycore.messages import DUMMY_STEP, StepPlan, StepResult, TransferResult
from raycore.parts.transfers.connectors.connector import ConnectorSetup, WorkerConnector, connector_class
from raycore.parts.transfers.connectors.worker_side.caches import KVCaches
from raycore.parts.transfers.connectors.worker_side.state_parts import StateParts
from raycore.rpc.pending import Pending
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors
from raycore.worker.cache_specs import layer_cache_specs
from raycore.worker.core import WorkerCore
from raycore.worker.kept_forms import layout_of
from raycore.worker.part import WorkerPart, called_by_name


class WorkerTransfers(WorkerPart):
    """Calls a connector's hooks around each step. The connector is made before the first cache, and stays."""

    option = "kv_transfer_config"

    def __init__(self, core: WorkerCore) -> None:
        super().__init__(core)
        self.connector: WorkerConnector = _NoConnector()
        self.is_in_step = False
        """Whether the hooks are called. In warm-ups, they aren't."""

    @classmethod
    def is_needed(cls, config: EngineConfig) -> bool:
        return config.kv_transfer_config is not None

    def prepare_cache(self, cache: KVCacheConfig) -> None:
        self._cache, layers = cache, self.core.setup.stage.layers
        if not any(cache.layout.stage_layers(layers)):
            raise InvalidConfig(
                f"kv_transfer_config: a pipeline stage has the layers {list(layers)}, which keep nothing in blocks: "
                "omit it, or use fewer stages"
            )
        if isinstance(self.connector, _NoConnector):
            config, rank = self.core.config, self.core.rank
            setup = ConnectorSetup(config, cache, rank.dp_rank, rank.world_size, rank.worker)
            self.connector = connector_class(config).worker_side(setup)

    def around_attention(
        self, attention: Attention, blocks: list[Tensor], num_blocks: int, states: Sequence[Tensor]
    ) -> Attention:
        """Tell the connector the memory of the cache. Its hooks are called around each layer if it needs them."""
        setup, layout = self.core.setup, self._cache.layout
        groups = layout.stage_layers(setup.stage.layers)
        place_of = {layer: place for place, layer in enumerate(sorted(layer for group in groups for layer in group))}
        places = [[place_of[layer] for layer in group] for group in groups]
        parts = StateParts(states, self._cache.num_state_parts)
        kept = layout.pages_beside(
            WorkerCacheSpec(layer_cache_specs(setup, setup.stage.layers), setup.stage.layers.start)
        )
        beside = {place_of[layer]: page for page, layer in enumerate(kept, len(blocks) - len(kept))}
        caches = KVCaches(blocks, num_blocks, layout_of(setup, layout), places, parts, beside)
        self.connector.register_kv_caches(caches)
        return ConnectedAttention(attention, self) if self.connector.has_layer_hooks else attention

    def acts_in_layers(self) -> bool:
        return self.connector.has_layer_hooks

    def release_cache(self) -> None:
        self.connector.release_kv_caches()

    @called_by_name
    def get_kv_connector_handshake_metadata(self) -> bytes | None:
        """Return what this worker's KV connector tells that of the scheduler, after the cache was allocated."""
        return self.connector.get_handshake_metadata()

    def begin(self, plan: StepPlan) -> None:
        """Load what the step needs. A step that the scheduler doesn't know of needs nothing, and reports nothing."""
        if plan.step == DUMMY_STEP:
            return
        self.is_in_step = True
        if plan.transfer is not None:
            self.connector.bind_connector_metadata(plan.transfer)
        self.connector.start_load_kv(plan)

    def end(self, plan: StepPlan, step: Pending[StepResult | None]) -> Pending[StepResult | None]:
        """Save what the step has changed. Returns the step, with what there is to report."""
        if plan.step == DUMMY_STEP:
            return step
        connector, self.is_in_step = self.connector, False
        connector.wait_for_save()
        sent, received = connector.get_finished()
        failed_blocks, reply = connector.get_block_ids_with_load_errors(), connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        if not (sent or received or failed_blocks) and reply is None:
            return step
        report = TransferResult(list(sent), list(received), list(failed_blocks), [] if reply is None else [reply])
        return WithReport(step, plan.step, report)

    def shut_down(self) -> None:
        self.connector.shutdown()


class _NoConnector(WorkerConnector):
    """Stands for the connector until the cache's size is known."""

    def register_kv_caches(self, caches: KVCaches) -> None: ...

    def start_load_kv(self, plan: StepPlan) -> None: ...


class WithReport:
    """A pending step whose result has a report of transfers. `Pending` of a worker that has no other result, too."""

    def __init__(self, step: Pending[StepResult | None], number: int, report: TransferResult) -> None:
        self._step = step
        self._number = number
        self._report = report

    def done(self) -> bool:
        """Whether `result()` would return at once."""
        return self._step.done()

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the step's result. Raises TimeoutError if it takes longer than `timeout` seconds."""
        result = self._step.result(timeout) or StepResult(self._number)
        result.transfer = self._report
        return result


class ConnectedAttention:
    """Attention around which a connector loads and saves each layer. Implements `Attention`."""

    def __init__(self, attention: Attention, transfers: WorkerTransfers) -> None:
        self._attention = attention
        self._transfers = transfers

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        self._attention.begin(step, tensors)

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        if not self._transfers.is_in_step:
            return self._attention(layer, qkv_TO)  # a warm-up
        connector = self._transfers.connector
        connector.wait_for_layer_load(layer)
        out = self._attention(layer, qkv_TO)
        connector.save_kv_layer(layer)
        return out
