"""The quantized checkpoints in tests/support/quantized, and what transformers computes with the tools' numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import new_request, plan

from raycore.runner.runner import ModelRunner
from raycore.sampling_params import SamplingParams

WRITTEN = Path(__file__).parent / "quantized"
PROMPT = [5, 60, 33, 2, 61, 17, 9, 44, 44, 8, 51, 23, 12]


def plain_copy(path: Path, written: Path) -> Path:
    """The same checkpoint, but with the numbers that the tool has made of the quantized weights."""
    dequantized = load_file(written / "dequantized.safetensors")
    layers = tuple(f"{name.removesuffix('weight')}" for name in dequantized)
    stored = load_file(written / "model.safetensors")
    rest = {name: tensor for name, tensor in stored.items() if not name.startswith(layers)}
    path.mkdir(exist_ok=True)
    save_file(rest | dequantized, path / "model.safetensors")
    return path


def check_logprobs(runner: ModelRunner, written: Path, path: Path, tolerance: float) -> None:
    """Check the log probabilities of every token at each position of a prompt. `path`: where files can be written.

    They are those of a Llama model in float32 with the tool's dequantized weights.
    """
    transformers = pytest.importorskip("transformers")
    config = json.loads((written / "config.json").read_text())
    config.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float().eval()
    model.load_state_dict(load_file(plain_copy(path, written) / "model.safetensors"), strict=True)
    with torch.inference_mode():
        expected_TV = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert expected_TV.std() > 0.5, "else all tokens are about as likely"

    params = SamplingParams(temperature=0.0, prompt_logprobs=expected_TV.shape[1])
    request = new_request(2, PROMPT, [9, 3, 40, 0], params=params)
    result = runner.execute(plan([2], [len(PROMPT)], new_requests=[request]))
    [(_, first, entries)] = result.prompt_logprobs
    assert (first, len(entries)) == (1, len(PROMPT) - 1)
    found_TV = torch.zeros(len(entries), expected_TV.shape[1])
    for position, entry in enumerate(entries):
        found_TV[position, list(entry.token_ids)] = torch.tensor(entry.logprobs)
    error = (found_TV - expected_TV[:-1]).abs().max().item()
    print(f"{written.name}: largest error of a log probability {error:.2e}, their deviation {expected_TV.std():.2f}")
    assert error <= tolerance
