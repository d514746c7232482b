"""The program under test: starts an engine, serves its callers and operators, and shuts it down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from placement.errors import PlacementShortage
from raycore.errors import RaycoreError
from raycore.llm import AsyncLLM
from raycore.outputs import RequestOutput
from raycore.system import asyncio, threading, time
from simulation.cluster import kinds
from simulation.cluster.anywhere import MODEL
from simulation.cluster.deployments import api_servers
from simulation.cluster.records import Deed, Record, Recorder, Sequence
from simulation.front import Front
from simulation.scenario import Operation, Scenario
from simulation.world.kernel import World
from simulation.world.threads import world

if TYPE_CHECKING:
    from simulation.cluster.accounts import Accounts

WORKER = "simulation.worker.worker.SimulatedWorker"
OPTIONS: dict[str, Any] = {
    "worker_cls": WORKER,
    "executor_backend": "ray",
    "executor_transport": "actor_call",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "num_gpu_blocks_override": 64,
    "block_size": 8,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "standby_delay_s": None,
}
"""What engines have unless a scenario says otherwise."""
_LOOK_S = 0.05
"""Virtual seconds between two looks whether requests have come to an end."""


class Driver:
    """See the module."""

    def __init__(self, scenario: Scenario, recorder: Recorder, accounts: Accounts) -> None:
        self._scenario = scenario
        self._recorder = recorder
        self._accounts = accounts
        self._front: Front | None = None
        """Where requests come in that API servers take. None: the driver's own threads make the calls."""
        self._began_s = 0.0
        """When the engine was up."""

    def listen(self, here: World) -> None:
        """Let requests come to API servers. To be called before `run`."""
        self._front = self._accounts.run.front = Front(here, self, self._recorder.records)

    def run(self) -> None:
        """The driver's main function."""
        ray.init(address="auto")
        try:
            llm = AsyncLLM(MODEL, use_tqdm_on_load=False, **OPTIONS | self._scenario.options)
        except (RaycoreError, PlacementShortage) as error:
            self._recorder.start_error = error
            world().tell(f"the engine didn't start: {_named(error)}")
            return
        if self._front is None:
            self._serve(llm)
        else:
            with api_servers.serving(llm, self._scenario.num_api_servers):
                self._serve(llm)
        llm.shutdown()
        self._accounts.stopped(llm)
        self._recorder.has_shut_down = True
        world().tell("the engine has shut down")

    def _serve(self, llm: AsyncLLM) -> None:
        """Let all callers and operators do what they have to."""
        self._began_s = time.monotonic()
        self._recorder.is_up = True
        world().tell("the engine is up")
        self._accounts.begin(llm)
        callers = [] if self._front else sorted({request.caller for request in self._scenario.requests})
        threads = [
            threading.Thread(target=self._operate, args=[llm], name="operator"),
            *(threading.Thread(target=self._call, args=[llm, each], name=f"caller{each}") for each in callers),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while self._front is not None and any(record.ended_s is None for record in self._recorder.records):
            time.sleep(_LOOK_S)
        self._recorder.unavailable = llm.unavailable_reason
        self._accounts.idle(llm)

    # ---- callers

    def _call(self, llm: AsyncLLM, caller: int) -> None:
        records = [record for record in self._recorder.records if record.request.caller == caller]
        asyncio.run(self._call_all(llm, records))

    async def _call_all(self, llm: AsyncLLM, records: list[Record]) -> None:
        await asyncio.gather(*(self._call_one(llm, record) for record in records))

    async def _call_one(self, llm: AsyncLLM, record: Record) -> None:
        await asyncio.sleep(max(0.0, self.due_in_s(record)))
        await self.request(llm, record)

    def due_in_s(self, record: Record) -> float:
        """Seconds until a request comes. Not more than 0: now."""
        return self._began_s + record.request.at_s - time.monotonic() if self._recorder.is_up else _LOOK_S

    async def request(self, llm: AsyncLLM, record: Record) -> None:
        """Make a request, and note what comes of it."""
        record.submitted_s = time.monotonic()
        record.sequences = [Sequence() for _ in range(record.request.n)]
        try:
            await asyncio.wait_for(self._take(llm, record), record.request.abort_after_s)
        except asyncio.TimeoutError:
            record.is_aborted = True
            world().tell(f"{record.name}: its caller leaves")
        except RaycoreError as error:
            record.error = error
            world().tell(f"{record.name} fails: {_named(error)}")
        record.ended_s = time.monotonic()

    async def _take(self, llm: AsyncLLM, record: Record) -> None:
        asked = kinds.asked(record.request)
        world().tell(f"{record.name} is submitted: {record.request}")
        is_over = False
        async for output in asked.perform(llm, asked, record):
            if asked.is_cumulative:
                self._accounts.output(record, output)
            if is_over and asked.has_tokens:
                record.problems.append("an output after the last one")
            is_over = output.finished
            if asked.has_tokens:
                _note(record, output, is_delta=asked.is_delta)
        if not is_over:
            record.problems.append("its outputs ended, and the last one wasn't finished")
        tokens = [sequence.tokens for sequence in record.sequences]
        world().tell(f"{record.name} ends with {tokens}")

    # ---- operators

    def _operate(self, llm: AsyncLLM) -> None:
        for operation in sorted(self._scenario.operations, key=lambda each: each.at_s):
            time.sleep(max(0.0, self._began_s + operation.at_s - time.monotonic()))
            deed = Deed(operation, time.monotonic())
            self._recorder.deeds.append(deed)
            world().tell(f"begins: {operation.kind} {operation.arguments}")
            if self._front is not None and operation.kind in api_servers.OPERATIONS:
                self._front.operate(deed, len(self._recorder.deeds))
            else:
                asyncio.run(self.operation(llm, deed))
            world().tell(f"has ended: {operation.kind}: {'done' if deed.error is None else _named(deed.error)}")

    async def operation(self, llm: AsyncLLM, deed: Deed) -> None:
        """Do what an operator wants, and note how it ends."""
        try:
            await _do(llm, deed.operation)
        except (RaycoreError, PlacementShortage) as error:
            deed.error = error
        deed.ended_s = time.monotonic()


def _note(record: Record, output: RequestOutput, *, is_delta: bool) -> None:
    """Add what a caller has got to what it had before."""
    record.adapter = output.lora_request
    if output.prompt_logprobs is not None:
        record.prompt_logprobs = list(output.prompt_logprobs)
    if output.prompt_hidden_states is not None:
        record.prompt_states = [row.tobytes() for row in output.prompt_hidden_states]
    for part in output.outputs:
        sequence = record.sequences[part.index]
        if sequence.finish_reason is not None and part.finish_reason is None:
            record.problems.append(f"sequence {part.index} goes on after its end")
        if not is_delta:
            if part.token_ids[: len(sequence.tokens)] != sequence.tokens:
                record.problems.append(f"sequence {part.index} was {sequence.tokens}, and is {part.token_ids}")
            sequence.tokens, sequence.logprobs, sequence.hidden_states = [], [], []
        sequence.tokens += part.token_ids
        sequence.logprobs += part.logprobs or ()
        sequence.hidden_states += (
            [row.tobytes() for row in part.hidden_states if row.size] if part.hidden_states is not None else []
        )
        sequence.finish_reason = part.finish_reason
        sequence.versions = [(span.version, span.start, span.end) for span in part.weight_versions or ()]


async def _do(llm: AsyncLLM, operation: Operation) -> None:
    method = getattr(llm, operation.kind)
    result = method(**operation.arguments)
    if asyncio.iscoroutine(result):
        await result


def _named(error: BaseException) -> str:
    """An error without what differs between runs."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
