"""What each part promises that adds to outputs: the fields that follow from the reports, however these come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from asks import checked
from configs import SPEC, make_config
from msgspec.structs import replace

from raycore.client.output_parts import make_output_parts
from raycore.client.output_processor import OutputProcessor
from raycore.client.part import OutputPart
from raycore.messages import FinishedRequest, OutputBatch, TokenReport
from raycore.outputs import RequestOutput
from raycore.parts.experts.models import MoeSpec
from raycore.parts.hidden_states.client import HiddenStates
from raycore.parts.routed_experts.client import ReturnedExperts
from raycore.parts.routed_experts.config import RoutedExpertsConfig
from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer

PROMPT = [7, 8, 9]
MOE = replace(SPEC, moe=MoeSpec(9, 2, 8, [True, False]))


class Sample(NamedTuple):
    """A part, and what it makes of reports."""

    part: OutputPart
    params: dict[str, Any]
    """With which a request asks for it."""
    data: Callable[[int, int], bytes]
    """What the rank `n` reports of the token at a position."""
    read: Callable[[RequestOutput, int], list[bytes]]
    """The same of all tokens but the last one, of one of a finished request's outputs."""


def _states(output: RequestOutput, index: int) -> list[bytes]:
    of_prompt, of_output = output.prompt_hidden_states, output.outputs[index].hidden_states
    assert of_prompt is not None
    assert of_output is not None
    if index == 0:
        assert np.array_equal(of_prompt[-1], of_output[0])
    return [each.tobytes() for each in (*of_prompt[:-1], *of_output)]


def _experts(output: RequestOutput, index: int) -> list[bytes]:
    ids_TLK = output.outputs[index].routed_experts
    assert ids_TLK is not None
    return [each_LK[0].tobytes() for each_LK in ids_TLK]


SAMPLES = [
    Sample(
        HiddenStates(),
        {"return_hidden_states": True, "return_prompt_hidden_states": True},
        lambda position, rank: np.array([position, rank], np.float32).tobytes(),
        _states,
    ),
    Sample(
        ReturnedExperts(MOE),
        {},
        lambda position, rank: bytes([position, rank]),
        _experts,
    ),
]
ALL = pytest.mark.parametrize("sample", SAMPLES, ids=lambda each: each.part.name)


class Requests:
    """A client that has one request."""

    def __init__(self, sample: Sample, tokenizer: Tokenizer, n: int = 1, **params: Any) -> None:
        self.sample = sample
        self.processor = OutputProcessor(tokenizer, parts=[sample.part])
        made = SamplingParams(n=n, **sample.params, **params)
        self.processor.add(checked("r", PROMPT, made, text="p"), list(range(1, n + 1)))

    def take(self, seq_id: int, tokens: list[int], first: int, end: int, reason: str = "", rank: int = 0) -> Any:
        """Take tokens, and reports of the tokens from position `first` to `end`. Returns the last output."""
        data = b"".join(self.sample.data(position, rank) for position in range(first, end))
        batch = OutputBatch(
            seq_ids=np.full(len(tokens), seq_id, np.int64).tobytes(),
            token_ids=np.array(tokens, np.int32).tobytes(),
            steps=[(len(tokens), 0.0, 0.01)],
            finished=[FinishedRequest(seq_id, reason)] if reason else [],
            reports=[(seq_id, TokenReport(self.sample.part.name, first, end - first, data))],
        )
        updates = self.processor.process(batch).updates
        return updates[-1].output if updates else None

    def expected(self, ranks: list[int]) -> list[bytes]:
        return [self.sample.data(position, rank) for position, rank in enumerate(ranks)]


def test_all_parts_are_tested() -> None:
    config = replace(make_config(MOE), routed_experts=RoutedExpertsConfig(enable_return_routed_experts=True))
    assert {type(part) for part in make_output_parts(config)} == {type(each.part) for each in SAMPLES}


@ALL
def test_chunks_and_steps_are_put_together(sample: Sample, tokenizer: Tokenizer) -> None:
    requests = Requests(sample, tokenizer)
    assert requests.take(1, [], 0, 2) is None
    assert requests.take(1, [20], 2, 3) is None
    output = requests.take(1, [21, 22], 3, 5, "length")
    assert sample.read(output, 0) == requests.expected([0] * 5)


@ALL
def test_what_is_computed_again_stays_as_it_was(sample: Sample, tokenizer: Tokenizer) -> None:
    requests = Requests(sample, tokenizer)
    requests.take(1, [20, 21], 0, 4)
    requests.processor.rebind(1, 5)
    requests.take(1, [22], 4, 5)  # too late: the rank has been given up
    requests.take(5, [], 0, 2, rank=3)
    output = requests.take(5, [22, 23], 2, 6, "length", rank=3)
    assert sample.read(output, 0) == requests.expected([0, 0, 0, 0, 3, 3])


@ALL
def test_what_is_behind_the_end_is_dropped(sample: Sample, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("12 34 56")
    requests = Requests(sample, tokenizer, stop=["3"])
    output = requests.take(1, tokens, 0, len(PROMPT) + len(tokens) - 1)
    num_output = len(output.outputs[0].token_ids)
    assert 0 < num_output < len(tokens)
    assert sample.read(output, 0) == requests.expected([0] * (len(PROMPT) + num_output - 1))


@ALL
def test_sequences_are_kept_apart(sample: Sample, tokenizer: Tokenizer) -> None:
    requests = Requests(sample, tokenizer, n=2)
    requests.take(1, [20], 0, 3)
    requests.take(2, [30], 0, 3, rank=1)
    requests.take(2, [31], 3, 4, "length", rank=1)
    output = requests.take(1, [21], 3, 4, "length")
    assert sample.read(output, 0) == requests.expected([0] * 4)
    assert sample.read(output, 1)[2:] == requests.expected([1] * 4)[2:], "the prompt may be the first one's"
