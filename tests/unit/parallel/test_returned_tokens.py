"""The first stage takes the tokens that the last one has sampled when it needs them, and adds them to its batch."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from torch import Tensor

from raycore.messages import NewRequest, StepPlan
from raycore.parallel.returned_tokens import TokenReceiver
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts
from raycore.sampling_params import SamplingParams
from raycore.step.batch import SlotBatch
from raycore.step.device_batch import DeviceBatch

MAX_STEPS = 3


class Arrivals:
    """The receiving end of a link. Fails where a real one would wait."""

    waited_s = 0.0

    def __init__(self) -> None:
        self.sent: deque[list[int]] = deque()

    def send(self, tensor: Tensor) -> None:
        self.sent.append(tensor.tolist())

    def receive_into(self, tensor: Tensor) -> Tensor:
        assert self.sent, "it waits for a token that it doesn't need yet"
        return tensor.copy_(torch.tensor(self.sent.popleft(), dtype=torch.int32))

    def finish(self) -> None:
        raise AssertionError("only the sender calls this")

    def close(self) -> None:
        pass


class Stage:
    """The first stage. `begin` runs a step up to its embedding, and returns the tokens that it computes."""

    def __init__(self, *, is_shared: bool) -> None:
        self.link = Arrivals()
        self.batch = DeviceBatch(SlotBatch(4, 16, 4), torch.device("cpu"), is_shared=is_shared)
        self.receiver = TokenReceiver(self.link, self.batch, MAX_STEPS)

    def begin(
        self,
        *slots: int,
        new: dict[int, list[int]] | None = None,
        num_tokens: int = 1,
        next_drafts: bytes = b"",
        drafts: Drafts = NO_DRAFTS,
    ) -> list[int]:
        requests = [new_request(slot, prompt) for slot, prompt in (new or {}).items()]
        counts = np.full(len(slots), num_tokens, np.int32).tobytes()
        plan = StepPlan(0, np.array(slots, np.int32).tobytes(), counts, new_requests=requests)
        self.batch.apply(plan)
        self.receiver.take_for(plan)
        step, tensors = self.batch.advance(plan, drafts)
        self.receiver.note(step, tensors, next_drafts)
        return self.batch.token_ids_of(tensors).tolist()


def new_request(slot: int, prompt: list[int]) -> NewRequest:
    token_ids, block_ids = np.array(prompt, np.int32).tobytes(), np.zeros(1, np.int32).tobytes()
    return NewRequest(slot, token_ids, len(prompt), 0, block_ids, SamplingParams(), 0)


@pytest.fixture(params=[True, False], ids=["CPU", "as on a GPU"])
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(is_shared=request.param)


def test_a_decode_waits_only_for_the_returned_token_of_its_slot(stage: Stage) -> None:
    assert stage.begin(0, new={0: [5]}) == [5]
    assert stage.begin(1, new={1: [6]}) == [6]
    stage.link.sent.append([50])
    assert stage.begin(0) == [50]
    stage.link.sent += [[60], [51]]
    assert stage.begin(1) == [60]
    assert len(stage.link.sent) == 1
    assert stage.begin(0) == [51]


def test_drafts_that_follow_a_steps_tokens_are_taken_with_them(stage: Stage) -> None:
    taken: list[tuple[list[int], list[list[int]]]] = []
    take = lambda slots, drafts: taken.append((slots.tolist(), drafts.tolist()))  # noqa: E731
    stage.receiver = TokenReceiver(stage.link, stage.batch, MAX_STEPS, on_host=True, max_drafts=2, take_drafts=take)
    next_drafts = np.array([2, 0, 1], np.int32).tobytes()
    assert stage.begin(0, 1, 2, new={0: [5], 1: [6], 2: [7]}, next_drafts=next_drafts) == [5, 6, 7]
    stage.link.sent += [[50, 60, 70], [[2, 51, 52], [1, 71, 0]]]
    assert stage.begin(2, new={2: [8, 9]}, num_tokens=2) == [8, 9], "another request, which waits for nothing"
    assert not taken
    assert stage.begin(0, 1) == [50, 60]
    assert taken == [([0], [[2, 51, 52]])], "those of the request that left its slot are dropped"
    assert stage.batch.host.token_ids[0, 1] == 50, "the host knows what drafts follow"


def test_wrong_drafts_are_dropped_when_the_tokens_arrive(stage: Stage) -> None:
    stage.receiver = TokenReceiver(stage.link, stage.batch, MAX_STEPS, on_host=True)
    stage.begin(0, new={0: [5]})
    stage.link.sent.append([50])
    assert stage.begin(0, drafts=Drafts.of([0], [[51, 9, 53]])) == [50, 51, 9, 53]
    stage.link.sent.append([51, 52, 53, 54])
    assert stage.begin(0) == [52]


def test_chunks_of_a_prompt_wait_for_no_returned_token(stage: Stage) -> None:
    assert stage.begin(0, new={0: [5, 6, 7, 8]}, num_tokens=2) == [5, 6]
    assert stage.begin(0, num_tokens=2) == [7, 8]
    stage.link.sent.append([50])
    assert stage.begin(0) == [50]


def test_a_token_of_a_request_that_left_its_slot_is_dropped(stage: Stage) -> None:
    assert stage.begin(0, 1, new={0: [5], 1: [6]}) == [5, 6]
    assert stage.begin(0, new={0: [7, 8]}, num_tokens=2) == [7, 8], "another request, which waits for nothing"
    stage.link.sent += [[50, 60], [70]]
    assert stage.begin(0, 1) == [70, 60]


def test_unneeded_returned_tokens_are_received_before_the_sender_has_to_wait(stage: Stage) -> None:
    for slot in range(MAX_STEPS):
        stage.begin(slot, new={slot: [5]})
    stage.link.sent.append([50])
    stage.begin(3, new={3: [6]})
    assert not stage.link.sent, "the engine has the oldest step's result, or it wouldn't have begun another one"


def test_finish_receives_all_returned_tokens(stage: Stage) -> None:
    stage.begin(0, new={0: [5]})
    stage.begin(1, new={1: [6, 7]}, num_tokens=1)  # samples nothing
    stage.begin(2, new={2: [8]})
    stage.link.sent += [[50], [80]]
    stage.receiver.finish()
    assert not stage.link.sent
    stage.receiver.finish()
