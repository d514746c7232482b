"""What images mean for the tokens of a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from vision_checkpoints import GEMMA3, IMAGE, QWEN2_5, QWEN3, Prompt, Prompts, image, make_vision_checkpoint

from raycore.checkpoint.model_spec import load_model_spec
from raycore.messages import NewRequest, StepPlan
from raycore.sampling_params import SamplingParams
from raycore.step.batch import SlotBatch
from raycore.step.features import FeatureRows, SlotFeatures


def batch_of(path: Path) -> SlotBatch:
    spec = load_model_spec(path).vision
    assert spec is not None
    features = SlotFeatures(spec, 4, has_axes=spec.kind != "siglip")
    return SlotBatch(4, 200, 16, features=features)


def new_request(slot: int, prompt: Prompt) -> NewRequest:
    num_tokens = len(prompt.token_ids)
    return NewRequest(
        slot=slot,
        token_ids=np.array(prompt.token_ids, np.int32).tobytes(),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_ids=np.zeros(13, np.int32).tobytes(),
        params=SamplingParams(),
        seed=0,
        features=prompt.features,
    )


def plan(step: int, slots: list[int], counts: list[int], **fields: object) -> StepPlan:
    return StepPlan(step, np.array(slots, np.int32).tobytes(), np.array(counts, np.int32).tobytes(), **fields)


@pytest.mark.parametrize("kind", [QWEN2_5, QWEN3])
def test_three_positions_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    path = make_vision_checkpoint(kind, tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path)
    images = [image(120, 90), image(60, 200, 1), image(100, 100, 2)]
    prompt = Prompts(path).make(f"{IMAGE} in{IMAGE}{IMAGE} this image? Describe it.", images)
    reference = {name: value for name, value in prompt.reference.items() if name != "pixel_values"}
    positions, delta = model.model.get_rope_index(**reference)
    expected_T3 = positions[:, 0].T.numpy()
    num_tokens = len(prompt.token_ids)
    batch = batch_of(path)
    text = Prompts(path).make("Describe the colours, please.", [])
    requests = [new_request(1, prompt), new_request(2, text)]
    found: list[np.ndarray] = []
    for step, count in enumerate([7, 11, num_tokens - 18]):
        new = requests if step == 0 else []
        chunk = plan(step, [2, 1], [1, count], new_requests=new)
        batch.apply(chunk)
        axes = batch.advance(chunk).features.axes
        assert axes[0].tolist() == [step] * 3, "a text counts up"
        found.append(axes[1:])
    assert np.array_equal(np.concatenate(found), expected_T3)
    decode = plan(3, [1], [1])
    assert batch.advance(decode).features.axes.tolist() == [[num_tokens + int(delta)] * 3]
    # another request in the same slot
    again = plan(4, [1], [2], freed_slots=[1], new_requests=[new_request(1, text)])
    batch.apply(again)
    assert batch.advance(again).features.axes.tolist() == [[0] * 3, [1] * 3]


def test_rows_of_images_in_chunks(tmp_path: Path) -> None:
    path = make_vision_checkpoint(GEMMA3, tmp_path)
    prompt = Prompts(path).make(f"What is in {IMAGE} and {IMAGE}?", [image(50, 50), image(50, 50, 1)])
    first, second = prompt.features
    batch = batch_of(path)
    count = first.position + 16
    whole = plan(0, [0], [count], new_requests=[new_request(0, prompt)])
    batch.apply(whole)
    features = batch.advance(whole).features
    assert features.rows == [FeatureRows(first.identifier, first.position, 0, 16)]
    assert features.axes is None
    assert features.ends.tolist() == [*range(1, first.position + 1), *[count] * 16]
    rest = plan(1, [0], [len(prompt.token_ids) - count])
    features = batch.advance(rest).features
    assert features.rows == [FeatureRows(second.identifier, second.position - count, 0, 16)]
    after = second.position + 16
    assert features.ends.tolist() == [
        *range(count + 1, second.position + 1),
        *[after] * 16,
        *range(after + 1, len(prompt.token_ids) + 1),
    ]
    assert torch.tensor(features.ends).dtype == torch.int32
