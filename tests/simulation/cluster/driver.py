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
from simulation.cluster.operations.catalogue import CAPABILITIES, CAPABILITY_OF
from simulation.cluster.records import Deed, Record, Recorder, Sequence
from simulation.front import Front
from simulation.ray.errors import Unexpected
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
"""How often an API server asks whether its engine is up."""
_MESSAGE_S = 2.0
"""How long an operator waits for a message with which to do something."""
_CURE_S = 5.0
"""How often callers' requests are looked after, and how long after operators' last operation that begins."""
_PATIENCE_S = 60.0
"""How long callers may wait before, if what the engine comes to by itself is judged."""


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
        self._is_cured = False
        """Whether the first operator does no more of what only one may do."""

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
            self._accounts.not_started()
            return
        if self._front is None:
            self._serve(llm)
        else:
            with api_servers.serving(llm, self._scenario.num_api_servers):
                self._serve(llm)
        self._accounts.before_shutdown()
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
        numbers = () if self._front else sorted({request.caller for request in self._scenario.requests})
        callers = [threading.Thread(target=self._call, args=[llm, each], name=f"caller{each}") for each in numbers]
        operators = [
            threading.Thread(target=self._operate, args=[llm, each], name=f"operator{each or ''}")
            for each in sorted({operation.operator for operation in self._scenario.operations})
        ]
        for thread in (*operators, *callers):
            thread.start()
        last_s = max((operation.at_s for operation in self._scenario.operations), default=0.0)
        for thread in operators:
            thread.join(max(0.0, self._began_s + last_s + _CURE_S - time.monotonic()))
        self._cure(llm, [*operators, *callers])
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
        record.came_s = min(record.submitted_s, self._began_s + record.request.at_s)
        record.sequences = [Sequence() for _ in range(record.request.n)]
        try:
            await asyncio.wait_for(self._take(llm, record), record.request.abort_after_s)
        except asyncio.TimeoutError:
            record.is_aborted = True
            world().tell(f"{record.name}: its caller leaves")
        except (RaycoreError, Unexpected) as error:
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

    def _operate(self, llm: AsyncLLM, operator: int) -> None:
        for operation in self._scenario.operations:
            if operation.operator == operator:
                time.sleep(max(0.0, self._began_s + operation.at_s - time.monotonic()))
                if not (self._is_cured and CAPABILITY_OF[operation.kind].has_one_operator):
                    self._perform(llm, operation)

    def _perform(self, llm: AsyncLLM, operation: Operation) -> None:
        deed = Deed(operation, time.monotonic())
        self._recorder.deeds.append(deed)
        world().tell(f"begins: {operation.kind} {operation.arguments}")
        if self._front is not None and operation.kind in api_servers.OPERATIONS:
            self._wait_for_message(deed)
            self._front.operate(deed, len(self._recorder.deeds))
        else:
            asyncio.run(self._operate_here(llm, deed))
        world().tell(f"has ended: {operation.kind}: {'done' if deed.error is None else _named(deed.error)}")

    async def _operate_here(self, llm: AsyncLLM, deed: Deed) -> None:
        self._wait_for_message(deed)  # on the loop, which has nothing else to do: the call follows at once
        await self.operation(llm, deed)

    def _wait_for_message(self, deed: Deed) -> None:
        """Wait until that comes with which the operator does something."""
        if deed.operation.with_message is not None:
            self._accounts.run.faults.wait_for(deed.operation.with_message, _MESSAGE_S)
            if deed.operation.places_later:
                world().come_between(deed.operation.places_later, _MESSAGE_S)
            deed.began_s = time.monotonic()

    def _cure(self, llm: AsyncLLM, waiting: list[threading.Thread]) -> None:
        """Undo what keeps requests from going on, as long as callers wait for some, or operators for requests."""
        if self._scenario.awaits_ranks:
            until_s = time.monotonic() + _PATIENCE_S
            while self._has_waiting(waiting) and time.monotonic() < until_s:
                time.sleep(_CURE_S)
            if not self._has_waiting(waiting):
                return
        while True:
            performed = {deed.operation.kind for deed in self._recorder.deeds}
            for capability in CAPABILITIES if performed and llm.unavailable_reason is None else ():
                for operation in capability.cures(llm, performed):
                    self._is_cured = True
                    self._perform(llm, operation)
            if not self._has_waiting(waiting):
                return
            time.sleep(_CURE_S)

    def _has_waiting(self, threads: list[threading.Thread]) -> bool:
        """Whether any caller or operator isn't done. `threads`: theirs, but not those of callers of API servers."""
        is_asked = self._front is not None and any(record.ended_s is None for record in self._recorder.records)
        return is_asked or any(thread.is_alive() for thread in threads)

    async def operation(self, llm: AsyncLLM, deed: Deed) -> None:
        """Do what an operator wants, and note how it ends."""
        try:
            await CAPABILITY_OF[deed.operation.kind].perform(llm, deed)
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


def _named(error: BaseException) -> str:
    """An error without what differs between runs."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
