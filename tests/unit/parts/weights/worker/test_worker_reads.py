"""How many bytes of weights a decode step reads, and how fast memory gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import make_checkpoint
from native_kernels import needs_kernels

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.config import resolve
from raycore.decoder.decoder import Decoder
from raycore.layers.native_operations import NativeOperations
from raycore.messages import Computation
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.weights.worker.reads import bytes_of_step, read_rate
from raycore.weights.linear_formats import STORED_INTEGERS
from raycore.weights.loader import load_decoder_weights
from raycore.weights.share import WeightShare
from raycore.worker.rank import WorkerRank
from raycore.worker.worker import Worker

ALONE = WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1)
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 640,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}
WEIGHTS_OF_LAYER = 512 * 512 * 3 + 3 * 512 * 2048
"""Without norms, which are less than a thousandth."""


def computation_of(folder: Path, **changes: object) -> Computation:
    (folder / "config.json").write_text(json.dumps(SHAPE | changes))
    worker = Worker(resolve(str(folder), load_format="dummy", num_threads=1), ALONE)
    worker.init_device()
    worker.load_model()
    try:
        return worker.computation()
    finally:
        worker.shutdown()


@needs_kernels
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_step_reads_the_layers_and_the_head_once_but_no_embedding(tmp_path: Path, is_tied: bool) -> None:
    computation = computation_of(tmp_path, tie_word_embeddings=is_tied)
    assert computation.step_bytes == pytest.approx(4 * (5 * WEIGHTS_OF_LAYER + 640 * 512), rel=1e-3)
    assert computation.memory_rate > 0


@needs_kernels
def test_a_step_reads_a_few_rows_of_the_table_of_layers_inputs(tmp_path: Path) -> None:
    found: list[int] = []
    for num_tokens in (208, 416):
        path = make_checkpoint("gemma4", tmp_path / str(num_tokens), vocab_size_per_layer_input=num_tokens)
        spec = fit_model(load_model_spec(path), path)
        weights = load_decoder_weights(WeightShare(spec, torch.float32), path)
        found.append(bytes_of_step(Decoder(spec, weights, TensorParallel(), NativeOperations()), spec))
    assert found[0] == found[1] > 0


@needs_kernels
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_in_integers_counts_as_they_are_in_memory(tmp_path: Path, is_tied: bool) -> None:
    gguf_files = pytest.importorskip("gguf_files", reason="needs the extra gguf")
    found: list[int] = []
    for vocab_size in (208, 416):
        where = tmp_path / str(vocab_size)
        sizes = {"vocab_size": vocab_size, "hidden_size": 256, "tie_word_embeddings": is_tied}
        file = gguf_files.write_gguf(make_checkpoint("llama3", where, **sizes), "llama3", where / "m.gguf", "Q8_0")
        spec = fit_model(load_model_spec(file), file)
        weights = load_decoder_weights(WeightShare(spec, torch.bfloat16, formats=STORED_INTEGERS), file)
        found.append(bytes_of_step(Decoder(spec, weights, TensorParallel(), NativeOperations()), spec))
    assert found[1] - found[0] == 208 * (256 + 256 // 32 * 4), "8 bits each, and a scale in float32 for 32 of them"


@needs_kernels
@pytest.mark.parametrize("changes", [{"num_hidden_layers": 4}, MOE], ids=["fits in caches", "experts"])
def test_a_worker_says_nothing_of_weights_that_caches_hold_or_that_depend_on_tokens(tmp_path, changes) -> None:
    computation = computation_of(tmp_path, **changes)
    assert (computation.step_bytes, computation.memory_rate) == (0, 0.0)


@needs_kernels
def test_reading_too_little_says_nothing_of_the_memory() -> None:
    assert read_rate([torch.ones(1000), torch.ones(1 << 20, 2).t()]) == 0.0
    assert read_rate([torch.ones(1 << 23, dtype=torch.bfloat16)] * 3) > 0
