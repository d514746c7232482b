"""What must be true of a run, whatever the seed has done to it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import msgspec

from raycore.config import EngineConfig
from raycore.messages import EngineRequest
from simulation.cluster.driver import parameters_of, prompt_of
from simulation.cluster.records import Record, Recorder, Sequence
from simulation.ray.cluster import Cluster
from simulation.worker import expected, model
from simulation.worker.model import Shape
from simulation.world.kernel import World

REQUEST_S = 900.0
"""Virtual seconds within which a request ends: its rank may be lost and replaced several times meanwhile, and a
replacement may wait for a node that is silent for 16 s and for a start of 30 s."""


def judged(recorder: Recorder, config: EngineConfig, world: World) -> Iterator[str]:
    """What is wrong with a run that is over."""
    for thread, error in world.failures:
        yield f"{thread} raised:\n{''.join(traceback.format_exception(error))}"
    if recorder.start_error is not None:  # nothing has broken yet
        yield f"the engine didn't start: {type(recorder.start_error).__name__}: {recorder.start_error}"
        return
    if not recorder.has_shut_down:
        yield "the driver ended before the engine was shut down"
    for record in recorder.records:
        for problem in _of_request(record, recorder, config):
            yield f"{record.name}: {problem}"
    for deed in recorder.deeds:
        if deed.ended_s is None:
            yield f"{deed.operation.kind} never ended"


def left_by_driver(cluster: Cluster) -> Iterator[str]:
    """What there is of an engine after its driver has ended, and some time has passed."""
    for actor in cluster.gcs.actors.values():
        if not actor.is_dead:
            yield f"the actor {actor} is left"
        incarnation = actor.incarnation
        if incarnation is not None and not incarnation.process.has_ended:
            yield f"the process of {actor} is left"
    for group in cluster.gcs.groups.values():
        if group.state != "REMOVED":
            yield f"the group {group.name} is left, {group.state}"


def _of_request(record: Record, recorder: Recorder, config: EngineConfig) -> Iterator[str]:
    yield from record.problems
    if record.submitted_s is None:
        yield "was never submitted"
        return
    if record.ended_s is None:
        yield "never ended"
        return
    if record.ended_s - record.submitted_s > REQUEST_S:
        yield f"took {record.ended_s - record.submitted_s:.0f} s"
    if record.error is not None and recorder.unavailable is None:
        yield f"failed, though the engine didn't: {type(record.error).__name__}: {record.error}"
    for index, sequence in enumerate(record.sequences):
        for problem in _of_sequence(record, index, sequence, config, _may_be_aborted(record, recorder)):
            yield f"sequence {index}: {problem}"


def _may_be_aborted(record: Record, recorder: Recorder) -> bool:
    """Whether an operator has aborted requests while this one ran."""
    assert record.submitted_s is not None
    assert record.ended_s is not None
    return any(
        deed.began_s <= record.ended_s
        and (deed.ended_s is None or deed.ended_s >= record.submitted_s)
        and deed.operation.kind in ("pause_generation", "sleep")
        and deed.operation.arguments.get("mode", "abort") == "abort"
        for deed in recorder.deeds
    )


def _of_sequence(
    record: Record, index: int, sequence: Sequence, config: EngineConfig, may_be_aborted: bool
) -> Iterator[str]:
    request = engine_request(record, index, config)
    weights = model.weights_of(config.model.model)
    wrong = expected.first_wrong(shape_of(config), request, sequence.tokens, [weights] * len(sequence.tokens))
    if wrong is not None:
        yield f"token {wrong} of {sequence.tokens} isn't what follows"
        return
    if record.error is not None or record.is_aborted:
        return
    if sequence.finish_reason == "abort" and may_be_aborted:
        return
    if not sequence.tokens:
        yield "has no tokens"
        return
    reason = expected.finish_reason(request, sequence.tokens, config.model.max_model_len)
    if reason != sequence.finish_reason:
        yield f"ended by {sequence.finish_reason} after {len(sequence.tokens)} tokens, not by {reason}"
    spans = [(start, end) for _, start, end in sequence.versions]
    if spans and [start for start, _ in spans] + [len(sequence.tokens)] != [0] + [end for _, end in spans]:
        yield f"the spans of its weights are {spans} of {len(sequence.tokens)} tokens"


def shape_of(config: EngineConfig) -> Shape:
    spec = config.model.spec
    return Shape(spec.vocab_size, (None,), spec.state is not None)


def engine_request(record: Record, index: int, config: EngineConfig) -> EngineRequest:
    """The request of one sequence, as it follows from the scenario alone."""
    params = parameters_of(record.request)
    return EngineRequest(
        seq_id=0,
        request_id=record.name,
        prompt_token_ids=prompt_of(record.request),
        params=msgspec.structs.replace(params, n=1),
        seed=0 if record.request.seed is None else record.request.seed + index,
        eos_token_ids=config.model.spec.eos_token_ids,
    )
