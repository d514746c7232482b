"""A worker's side of the KV connector in the course of steps."""

from __future__ import annotations

from torch import Tensor

from raycore.attention.spec import Attention
from raycore.cache_layout import KVCacheConfig
from raycore.kv_transfer.connector import ConnectorSetup, WorkerConnector, connector_class
from raycore.kv_transfer.worker_side.caches import KVCaches
from raycore.messages import StepPlan, StepResult, TransferResult
from raycore.pending import Pending
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors
from raycore.worker.kept_forms import layout_of
from raycore.worker.setup import WorkerSetup


class WorkerTransfers:
    """Calls a connector's hooks around each step."""

    def __init__(self, setup: WorkerSetup, cache: KVCacheConfig) -> None:
        self._layout = layout_of(setup)
        self.is_in_step = False
        """Whether the hooks are called. In warm-ups, they aren't."""
        rank = setup.rank
        connector_setup = ConnectorSetup(setup.config, cache, rank.dp_rank, rank.world_size, rank.worker)
        self.connector: WorkerConnector = connector_class(setup.config).worker_side(connector_setup)

    def register(self, layers: list[Tensor], num_blocks: int) -> None:
        """Tell the connector the memory of the cache, by layer."""
        self.connector.register_kv_caches(KVCaches(layers, num_blocks, self._layout))

    def around(self, attention: Attention) -> Attention:
        """Return what computes attention, with the connector's hooks around each layer if it needs them."""
        return ConnectedAttention(attention, self) if self.connector.has_layer_hooks else attention

    def begin(self, plan: StepPlan) -> None:
        """Load what the step needs."""
        self.is_in_step = True
        if plan.transfer is not None:
            self.connector.bind_connector_metadata(plan.transfer)
        self.connector.start_load_kv(plan)

    def end(self, plan: StepPlan, step: Pending[StepResult | None]) -> Pending[StepResult | None]:
        """Save what the step has changed. Returns the step, with what there is to report."""
        connector, self.is_in_step = self.connector, False
        connector.wait_for_save()
        sent, received = connector.get_finished()
        failed_blocks, reply = connector.get_block_ids_with_load_errors(), connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        if not (sent or received or failed_blocks) and reply is None:
            return step
        report = TransferResult(list(sent), list(received), list(failed_blocks), [] if reply is None else [reply])
        return WithReport(step, plan.step, report)


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
