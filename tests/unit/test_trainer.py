"""A trainer's log probabilities have the bits of an engine's, and the gradients of the trainer's model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.errors import InvalidInput
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.trainer import logprobs
from raycore.worker.rank import RankIdentity

OPTIONS = {"dtype": "bfloat16", "num_threads": 1, "max_model_len": 64, "num_gpu_blocks_override": 32}
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]
NUM_NEW = 6


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def sampled(model: nn.Module, folder: object) -> list[tuple[list[int], list[float]]]:
    """By prompt: the tokens that an engine samples with the model's weights, and their log probabilities."""
    model.save_pretrained(folder)
    config = resolve(folder, batch_invariant=True, skip_tokenizer_init=True, **OPTIONS)
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    params = SamplingParams(temperature=1.0, max_tokens=NUM_NEW, logprobs=0, ignore_eos=True, detokenize=False)
    for seq_id, prompt in enumerate(PROMPTS):
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, params, seed=seq_id))
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in PROMPTS]
    while core.has_work():
        for seq_id, entry in core.step().logprobs:
            found[seq_id][0].append(entry.token_ids[0])
            found[seq_id][1].append(entry.logprobs[0])
    core.shutdown()
    return found


def padded(sequences: list[list[int]], *, on_left: bool) -> tuple[Tensor, Tensor]:
    """The sequences in one tensor, and its mask."""
    length = max(map(len, sequences))
    ids_BL, mask_BL = torch.zeros(len(sequences), length, dtype=torch.int64), torch.zeros(len(sequences), length).long()
    for row, sequence in enumerate(sequences):
        place = slice(length - len(sequence), length) if on_left else slice(len(sequence))
        ids_BL[row, place], mask_BL[row, place] = torch.tensor(sequence), 1
    return ids_BL, mask_BL


def scored(logprobs_BL: Tensor, mask_BL: Tensor) -> Iterator[list[float]]:
    for logprobs_L, mask_L in zip(logprobs_BL, mask_BL, strict=True):
        yield logprobs_L[(mask_L[1:] & mask_L[:-1]).bool()].tolist()


@pytest.mark.parametrize("on_left", [False, True])
def test_numbers_have_the_bits_of_an_engines_also_after_the_weights_have_changed(model, tmp_path, on_left):
    for _ in range(2):
        rollouts = sampled(model, tmp_path)
        sequences = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, rollouts, strict=True)]
        ids_BL, mask_BL = padded(sequences, on_left=on_left)
        with torch.no_grad():
            found_BL = logprobs(model, ids_BL, mask_BL, **OPTIONS)
            for weight in model.parameters():
                weight += 0.05 * torch.randn_like(weight)
        ends = [own[-NUM_NEW:] for own in scored(found_BL, mask_BL)]
        assert ends == [values for _, values in rollouts]
        assert found_BL[:, 0].eq(0).sum() == (2 if on_left else 0)


def test_gradients_are_those_of_the_model(model):
    ids_BL, mask_BL = padded([*PROMPTS, [3]], on_left=False)
    num_threads = torch.get_num_threads()
    found_BL = logprobs(model, ids_BL, mask_BL, **OPTIONS | {"dtype": "float32"})
    found_BL.sum().backward()
    found = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    all_BLV = model(input_ids=ids_BL, attention_mask=mask_BL).logits[:, :-1].log_softmax(-1)
    own_BL = all_BLV.gather(-1, ids_BL[:, 1:, None])[..., 0] * mask_BL[:, 1:]
    torch.testing.assert_close(found_BL, own_BL, atol=1e-4, rtol=1e-4)
    own_BL.sum().backward()
    for mine, weight in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, weight.grad)
    assert found_BL[3].eq(0).all()
    assert torch.get_num_threads() == num_threads


def packed(sequences: list[list[int]], lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of so many of the sequences each: tokens, mask and positions."""
    rest = iter(sequences)
    rows = [[next(rest) for _ in range(number)] for number in lengths]
    width = max(sum(len(each) + 1 for each in row) for row in rows)
    ids_BL, mask_BL, position_ids = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3))
    for index, row in enumerate(rows):
        end = 0
        for place, each in enumerate(row):
            end += place % 2  # every second one follows without padding
            own = index, slice(end, end + len(each))
            ids_BL[own], mask_BL[own], position_ids[own] = torch.tensor(each), 1, torch.arange(len(each))
            end += len(each)
    return ids_BL, mask_BL, position_ids


def test_packed_sequences_have_the_numbers_and_gradients_of_sequences_in_rows(model):
    sequences = [*PROMPTS, [3], [40, 41, 42]]
    ids_BL, mask_BL = padded(sequences, on_left=False)
    options = OPTIONS | {"dtype": "float32"}
    by_row_BL = logprobs(model, ids_BL, mask_BL, **options)
    by_row_BL.sum().backward()
    expected = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    packed_BL, packed_mask_BL, position_ids = packed(sequences, [3, 2])
    found_BL = logprobs(model, packed_BL, packed_mask_BL, position_ids=position_ids, **options)
    found = found_BL[found_BL != 0].tolist()
    assert found == by_row_BL[by_row_BL != 0].tolist()
    assert len(found) == sum(len(each) - 1 for each in sequences)
    found_BL.sum().backward()
    for weight, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("position_ids", "mask_BL", "message"),
    [
        ([[0, 1, 2]], None, r"torch.int64\[1, 3\]"),
        ([[0, 1, 3, 4]], None, "position_ids has 3 at token 2 of row 0"),
        ([[1, 2, 0, 1]], None, "position_ids has 1 at token 0 of row 0"),
        ([[0, 1, 2, 3]], [[1, 0, 1, 1]], "position_ids has 2 at token 2 of row 0"),
    ],
)
def test_positions_that_are_not_those_of_sequences_are_refused(model, position_ids, mask_BL, message):
    mask_BL = None if mask_BL is None else torch.tensor(mask_BL)
    with pytest.raises(InvalidInput, match=message), torch.no_grad():
        logprobs(model, torch.ones(1, 4).long(), mask_BL, position_ids=torch.tensor(position_ids), **OPTIONS)


@pytest.mark.parametrize(
    ("ids_BL", "mask_BL", "message"),
    [
        (torch.ones(2, 3), None, r"torch.float32\[2, 3\]"),
        (torch.ones(3).long(), None, r"torch.int64\[3\]"),
        (torch.ones(2, 3).long(), torch.ones(2, 2), r"\[2, 2\]"),
        (torch.ones(2, 3).long(), torch.tensor([[1, 1, 0], [1, 0, 1]]), "between others in sequence 1"),
        (torch.ones(1, 64).long(), None, "sequence 0 has 64 tokens"),
    ],
)
def test_bad_input_is_refused(model, ids_BL, mask_BL, message):
    with pytest.raises(InvalidInput, match=message), torch.no_grad():
        logprobs(model, ids_BL, mask_BL, **OPTIONS)
