"""What users' logits processors see of the batch, where they come among the rules, and what their errors do."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from small_model import make_sampling

from raycore.sampling.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from raycore.sampling.processor_batch import ProcessorBatch
from raycore.sampling.sampler import Sampler
from raycore.sampling_params import SamplingParams

VOCAB = 40
NUM_SLOTS = 8
GREEDY = SamplingParams(temperature=0.0)


class Tokens:
    """The tokens of the requests, by slot."""

    def __init__(self):
        self.token_ids = np.zeros((NUM_SLOTS, 64), np.int32)
        self.token_ids_SM = torch.as_tensor(self.token_ids)
        self.num_prompt = np.zeros(NUM_SLOTS, np.int64)
        self.length = np.zeros(NUM_SLOTS, np.int64)

    def put(self, slot, prompt, output=()):
        ids = [*prompt, *output]
        self.token_ids[slot, : len(ids)] = ids
        self.num_prompt[slot], self.length[slot] = len(prompt), len(ids)


class Requests:
    """A sampler with processors, and the requests in its slots."""

    def __init__(self, *classes, mode="raw_logprobs"):
        self.tokens = Tokens()
        self.processors = ProcessorBatch(lambda: [each(None, torch.device("cpu"), False) for each in classes])
        self.sampler = Sampler(VOCAB, make_sampling("torch"), processors=self.processors, logprobs_mode=mode)

    @property
    def made(self) -> list[Any]:
        return list(self.processors._processors)

    def add(self, slot, params=GREEDY, prompt=(1, 2), output=()):
        self.tokens.put(slot, prompt, output)
        self.sampler.add(slot, params, seed=slot)

    def step(self, slots, logits=None):
        """Sample a token for each slot, and append it. Returns the tokens, and (row, reason) of requests that fail."""
        slots = np.array(slots)
        if logits is None:
            logits = torch.zeros(len(slots), VOCAB)
        sampled = self.sampler.sample(logits, slots, self.tokens.length[slots], self.tokens)
        ids = sampled.token_ids_R.tolist()
        for slot, token_id in zip(slots.tolist(), ids, strict=True):
            self.tokens.token_ids[slot, self.tokens.length[slot]] = token_id
            self.tokens.length[slot] += 1
        return ids, sampled.failed


class Records(LogitsProcessor):
    """Follows the batch as vLLM documents it: requests are removed, then added, then moved."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.batch: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
        self.seen: dict[int, float] = {}
        self.num_updates = 0

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        self.num_updates += 1
        if batch_update is None:
            return
        for index in batch_update.removed:
            del self.batch[index]
        for index, params, prompt, output in batch_update.added:
            self.batch[index] = (params, prompt, output)
        for source, target, direction in batch_update.moved:
            assert direction is MoveDirectionality.UNIDIRECTIONAL
            self.batch[target] = self.batch.pop(source)
        assert sorted(self.batch) == list(range(batch_update.batch_size))

    def apply(self, logits):
        assert logits.shape == (len(self.batch), VOCAB)
        self.seen = dict(enumerate(logits[:, 0].tolist()))
        return logits


def test_processors_see_each_request_at_its_index_with_all_its_tokens():
    chosen = random.Random(5)
    requests = Requests(Records)
    (records,) = requests.made
    running: dict[int, SamplingParams] = {}
    for number in range(300):
        for slot in list(running):
            if chosen.random() < 0.15:
                requests.sampler.remove(slot)
                del running[slot]
        for slot in set(range(NUM_SLOTS)) - set(running):
            if chosen.random() < 0.2:
                running[slot] = SamplingParams(temperature=0.0, extra_args={"number": number, "slot": slot})
                output = [3] * chosen.choice([0, 0, 4])  # some were preempted, or come from a rank that was lost
                requests.add(slot, running[slot], prompt=[1] * chosen.randint(1, 5), output=output)
        for slot, length in enumerate(requests.tokens.length.tolist()):
            if length > 60:
                requests.sampler.remove(slot)
                requests.tokens.length[slot] = 0
                running.pop(slot, None)
        slots = [slot for slot in running if chosen.random() < 0.8]
        chosen.shuffle(slots)
        if not slots:
            continue
        tokens = requests.tokens
        before = {slot: tokens.token_ids[slot, : tokens.length[slot]].tolist() for slot in slots}
        logits = torch.tensor([[100.0 + slot, *[0.0] * (VOCAB - 1)] for slot in slots])
        ids, failed = requests.step(slots, logits)
        assert ids == [0] * len(slots)
        assert failed == []
        indexes = {params.extra_args["slot"]: index for index, (params, _, _) in records.batch.items()}
        for slot in slots:
            params, prompt, output = records.batch[indexes[slot]]
            assert params is running[slot]
            assert [*prompt, *output] == before[slot]
            assert len(prompt) == tokens.num_prompt[slot]
            assert records.seen[indexes[slot]] == 100.0 + slot
    assert records.num_updates > 200


def test_requests_enter_the_batch_with_their_first_token_and_none_is_told_twice():
    class Tells(Records):
        def update_state(self, batch_update):
            updates.append(batch_update)

        def apply(self, logits):
            return logits

    updates: list[BatchUpdate | None] = []
    requests = Requests(Tells)
    for slot in (0, 1, 2):
        requests.add(slot)
    requests.step([0, 2])
    requests.step([2, 0])
    requests.sampler.remove(0)
    requests.step([1, 2])
    requests.sampler.remove(1)
    requests.step([2])
    first, none, third, fourth = updates
    assert first is not None
    assert [added[0] for added in first.added] == [0, 1]
    assert (first.removed, first.moved, first.batch_size) == ([], [], 2)
    assert none is None
    assert third is not None
    assert [added[0] for added in third.added] == [0], "it gets the index of the request that has left"
    assert (third.removed, third.moved) == ([], [])
    assert fourth is not None
    assert (fourth.removed, fourth.added) == ([], [])
    assert fourth.moved == [(1, 0, MoveDirectionality.UNIDIRECTIONAL)]


def of_each(function, *, is_invariant=False):
    """A class whose processor changes all logits at once."""

    class Changes(LogitsProcessor):
        def __init__(self, vllm_config, device, is_pin_memory):
            pass

        def is_argmax_invariant(self):
            return is_invariant

        def update_state(self, batch_update):
            pass

        def apply(self, logits):
            return function(logits)

    return Changes


def test_processors_run_after_biases_and_before_penalties():
    seen: list[torch.Tensor] = []

    def look(logits):
        seen.append(logits.clone())
        logits[:, 9] = 6.0
        return logits

    requests = Requests(of_each(look), mode="processed_logits")
    params = SamplingParams(
        temperature=0.0, logit_bias={4: 2.5}, repetition_penalty=2.0, min_tokens=1, bad_words=None, logprobs=-1
    )
    requests.tokens.put(0, [9, 2])
    requests.sampler.add(0, params, 0, eos_token_ids=[7])
    logits = torch.ones(1, VOCAB)
    sampled = requests.sampler.sample(logits, np.array([0]), np.array([2]), requests.tokens)
    (given,) = seen
    assert given[0, [4, 7, 9, 2]].tolist() == [3.5, -np.inf, 1.0, 1.0]
    [(_, download)] = sampled.logprobs
    (entry,) = download.entries()
    values = dict(zip(entry.token_ids, entry.logprobs, strict=True))
    assert values[9] == 3.0, "the penalty is applied to what the processor made"
    assert values[2] == 0.5
    assert torch.equal(logits, torch.ones(1, VOCAB)), "the model's own logits stay"


def test_processors_that_keep_the_most_likely_token_come_between_min_p_and_top_k():
    seen: list[torch.Tensor] = []

    def look(logits):
        seen.append(logits.clone())
        logits[0, 5] = 100.0
        return logits

    requests = Requests(of_each(look, is_invariant=True), mode="processed_logits")
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(2, 1) / 2
    requests.add(0, SamplingParams(temperature=2.0, min_p=0.2, top_k=1, logprobs=2))
    requests.add(1, GREEDY)
    assert requests.step([0, 1], logits)[0] == [5, VOCAB - 1]
    (given,) = seen
    scaled = logits[0] / 2
    kept = (scaled - scaled.max()).exp() >= 0.2
    assert torch.equal(given[0], scaled.masked_fill(~kept, -torch.inf))
    seen.clear()
    assert requests.step([1], logits[1:])[0] == [VOCAB - 1]
    assert not seen, "greedy requests don't need it"


class Forces(AdapterLogitsProcessor):
    """Forces the token `target` of a request's `extra_args`. Others are as they are."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        args = params.extra_args or {}
        if args.get("refuses"):
            raise KeyError("no such thing")
        if "target" not in args:
            return None

        def force(output_ids, logits):
            if len(output_ids) == args.get("fails_at", -1):
                raise ValueError(f"after {output_ids}")
            kept = logits[args["target"]].clone()
            logits[:] = -torch.inf
            logits[args["target"]] = kept
            return logits

        def copy_of_prompt(prompt_ids, output_ids, logits):
            changed = torch.full_like(logits, -torch.inf)
            changed[prompt_ids[len(output_ids) % len(prompt_ids)]] = 0.0
            return changed

        return copy_of_prompt if args["target"] == "prompt" else force


def forced(target, **args):
    return SamplingParams(extra_args={"target": target, **args})


def test_adapters_change_only_the_requests_that_ask_for_it():
    requests = Requests(Forces)
    requests.add(0, forced(17))
    requests.add(1, GREEDY)
    requests.add(2, forced("prompt"), prompt=[21, 22, 23], output=[21])
    logits = torch.zeros(3, VOCAB)
    logits[:, 30] = 5.0
    for expected in (22, 23, 21):
        assert requests.step([0, 1, 2], logits)[0] == [17, 30, expected]
    requests.sampler.remove(0)
    assert requests.step([2, 1], logits[:2])[0] == [22, 30]


def test_an_error_for_one_request_fails_that_request_alone():
    requests = Requests(Forces)
    requests.add(0, forced(17, fails_at=1))
    requests.add(1, forced(18))
    assert requests.step([0, 1]) == ([17, 18], [])
    ids, failed = requests.step([1, 0])
    assert ids[0] == 18
    [(row, why)] = failed
    assert row == 1
    assert "Forces failed: ValueError: after [17]" in why
    requests.sampler.remove(0)
    requests.add(0, SamplingParams(extra_args={"refuses": True}))
    ids, failed = requests.step([0, 1])
    assert [row for row, _ in failed] == [0]
    assert "KeyError: 'no such thing'" in failed[0][1]
    assert ids[1] == 18
    requests.sampler.remove(0)
    assert requests.step([1]) == ([18], [])


@pytest.mark.parametrize("problem", ["raises", "shape", "nothing"])
def test_an_error_for_all_fails_the_steps_requests_and_later_ones_start_anew(problem):
    class Breaks(Records):
        def apply(self, logits):
            if any((params.extra_args or {}).get("breaks") for params, _, _ in self.batch.values()):
                if problem == "raises":
                    raise RuntimeError("broken")
                return logits[:1, :3] if problem == "shape" else None
            return super().apply(logits)

    requests = Requests(Breaks)
    requests.add(0)
    requests.add(5)
    assert requests.step([0]) == ([0], [])
    requests.add(1, SamplingParams(extra_args={"breaks": True}))
    _, failed = requests.step([0, 1])
    assert [row for row, _ in failed] == [0, 1]
    assert all("Breaks failed in apply(): " in why for _, why in failed)
    requests.sampler.remove(0)
    requests.sampler.remove(1)
    assert requests.step([5]) == ([0], [])
    assert [params for params, _, _ in requests.made[0].batch.values()] == [GREEDY]


def test_a_new_request_that_breaks_the_batchs_state_fails_without_the_older_ones():
    class Refuses(Records):
        def update_state(self, batch_update):
            for _, params, _, _ in batch_update.added if batch_update else ():
                assert not (params.extra_args or {}).get("breaks"), "not for me"
            super().update_state(batch_update)

    requests = Requests(Refuses)
    requests.add(0)
    assert requests.step([0]) == ([0], [])
    requests.add(1, SamplingParams(extra_args={"breaks": True}))
    logits = torch.zeros(2, VOCAB)
    logits[0, 3] = 1.0
    ids, failed = requests.step([0, 1], logits)
    assert [row for row, _ in failed] == [1]
    assert "Refuses failed in update_state(): AssertionError" in failed[0][1]
    assert ids[0] == 3
    assert [(prompt, output) for _, prompt, output in requests.made[0].batch.values()] == [([1, 2], [0])]
    requests.sampler.remove(1)
    assert requests.step([0]) == ([0], [])
