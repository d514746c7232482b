"""Damaged GGUF files: each must give an error that names the file, soon and without much memory, or be read as it is.

usage: python -m tests.fuzz.gguf_files [--count 2000] [--seed 0]

Files are small models of several families and types, with one to three damages: truncated; a count, a length, a type,
an offset or a size replaced by another number or by one at a boundary; bytes flipped, removed, inserted or repeated; an
entry of the metadata with another value; parts of a split model that say another number or have another name; scales
of blocks that are infinite, no numbers, or the largest ones. A file is read as an engine's driver and its workers read
it: description, tensors compared with it, tokenizer, and all weights, once as numbers and once packed in integers. Both
must be the same, and layers of packed weights are computed. What is printed: how many were refused and how many could
be read, the longest time, and how much memory was added.
"""

from __future__ import annotations

import argparse
import random
import resource
import struct
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from families import make_checkpoint
from gguf_files import OPTIONS, write_gguf

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.kernels import library as native_kernels
from raycore.layers.native_operations import NativeOperations
from raycore.text.tokenizer import Tokenizer
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.linear_formats import STORED_INTEGERS
from raycore.weights.loader import load_decoder_weights
from raycore.weights.named import named_weights
from raycore.weights.share import WeightShare

MAX_S, MAX_MIB = 5.0, 512
"""A file may take no longer, and all files together no more memory."""
_FAMILIES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("llama3", "Q8_0", {}),
    ("llama2", "Q4_K", {"v_proj": "Q6_K", "down_proj": "Q6_K"}),
    ("qwen2", "Q5_K", {"up_proj": "Q4_1"}),
    ("qwen3", "Q4_0", {"k_proj": "Q5_0"}),
    ("mixtral", "F16", {}),
    ("gemma3", "Q5_1", {}),
    ("phi3_longrope", "F32", {}),
)
"""Names of families, types, and other types of some of the layers."""
_WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Rows of whole blocks of 256."""
_SCALES = (0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0xFBFF, 0x0001, 0x8000)
"""Numbers in float16: infinite ones, no number, the largest ones, the smallest, and -0."""
_BOUNDARIES = [0, 1, 2, 3, 31, 32, 33, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**62, 2**63, 2**64 - 1]


def tokenizer_metadata(num_tokens: int) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer with a chat template."""
    tokens = [chr(256 + byte) for byte in range(num_tokens - 4)] + ["ĀĀ", "ĀĀĀ", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (num_tokens - 2) + [3, 3],
        "tokenizer.ggml.merges": ["Ā Ā", "ĀĀ Ā"],
        "tokenizer.ggml.eos_token_id": num_tokens - 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


def make_models(directory: Path) -> list[list[Path]]:
    """Write the models that are damaged, and return each one's files."""
    models: list[list[Path]] = []
    for family, kind, kinds in _FAMILIES:
        sizes = OPTIONS.get(family, {}) | (_WIDE if "_K" in kind else {})
        checkpoint = make_checkpoint(family, directory / f"{family}-checkpoint", **sizes)
        (directory / family).mkdir(parents=True)
        parts, metadata = (3 if family == "qwen3" else 1), tokenizer_metadata(208)
        write_gguf(
            checkpoint, family, directory / family / "model.gguf", kind, kinds=kinds, metadata=metadata, parts=parts
        )
        models.append(sorted((directory / family).glob("*.gguf")))
    return models


def read_all(path: Path) -> None:
    """Read a file as an engine does. Raises InvalidCheckpoint or InvalidConfig, and AssertionError if packed weights
    aren't those that were converted."""
    spec = fit_model(load_model_spec(path), path)
    Tokenizer.from_dir(path).encode("Hello, world")
    converted = named_weights(load_decoder_weights(WeightShare(spec, torch.float32), path))
    share = WeightShare(spec, torch.float32, formats=STORED_INTEGERS)
    for (name, numbers), (_, weight) in zip(converted, named_weights(load_decoder_weights(share, path)), strict=True):
        assert isinstance(numbers, torch.Tensor)
        if isinstance(weight, IntegerWeight | IntegerParts):
            _compare(name, weight, numbers)


def _compare(name: str, weight: IntegerWeight | IntegerParts, numbers_OI: torch.Tensor) -> None:
    """Check that a packed weight has the numbers that others were converted to, and that its layer can be computed."""
    kept_OI, is_finite_OI = weight.dequantize(torch.float32), numbers_OI.isfinite()
    assert torch.equal(kept_OI.isfinite(), is_finite_OI), f"{name} has other numbers that aren't finite"
    assert torch.equal(kept_OI[is_finite_OI], numbers_OI[is_finite_OI]), f"{name} has other numbers"
    if native_kernels.load():
        results_TO = NativeOperations().linear(weight)(torch.ones(3, weight.shape[1]))
        is_finite_O = is_finite_OI.all(1) & (numbers_OI.abs().amax(1) < 1e30)
        assert results_TO[:, is_finite_O].isfinite().all(), f"the layer {name} has results that aren't finite"


def damaged(data: bytes, rng: random.Random, header_bytes: int) -> bytes:
    """Return a file with one damage, mostly in its header."""
    changed = bytearray(data)
    end = header_bytes if rng.random() < 0.9 else len(data)
    at = rng.randrange(max(1, min(end, len(data))))
    kind = rng.choice(("truncate", "number", "number", "number", "boundary", "flip", "flip", "cut", "insert", "repeat"))
    length = rng.choice((1, 4, 8, 32, 1000))
    if kind == "truncate":
        del changed[at:]
    elif kind in ("number", "boundary"):
        code = rng.choice("IQ")
        value = rng.choice(_BOUNDARIES) if kind == "boundary" else rng.randrange(2 ** rng.randrange(1, 64))
        size = struct.calcsize(f"<{code}")
        changed[at : at + size] = struct.pack(f"<{code}", value % 2 ** (8 * size))
    elif kind == "flip":
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del changed[at : at + length]
    elif kind == "insert":
        changed[at:at] = rng.randbytes(length)
    else:
        changed[at:at] = changed[at : at + length]
    return bytes(changed)


def with_scales(data: bytes, rng: random.Random, header_bytes: int) -> bytes:
    """Return a file in which some pairs of bytes behind the header are odd numbers in float16."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 10, 1000))):
        at = rng.randrange(header_bytes // 2, max(header_bytes // 2 + 1, len(changed) // 2)) * 2
        changed[at : at + 2] = struct.pack("<H", rng.choice(_SCALES))
    return bytes(changed)


def at_fields(data: bytes, rng: random.Random, fields: list[int]) -> bytes:
    """Return a file in which a number that a header's structure depends on has another value."""
    changed, at = bytearray(data), rng.choice(fields)
    value = rng.choice([*_BOUNDARIES, rng.randrange(2 ** rng.randrange(1, 64))])
    changed[at : at + 8] = struct.pack("<Q", value)
    return bytes(changed)


def structure(data: bytes) -> tuple[list[int], int]:
    """Return where a sound file has counts, lengths, types, shapes and offsets, and where its header ends."""
    fields, at = [4, 8, 16], 24
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    num_tensors, num_entries = struct.unpack_from("<QQ", data, 8)

    def string() -> None:
        nonlocal at
        fields.append(at)
        at += 8 + struct.unpack_from("<Q", data, at)[0]

    for _ in range(num_entries):
        string()
        (kind,) = struct.unpack_from("<I", data, at)
        fields.append(at)
        at += 4
        if kind == 8:
            string()
        elif kind == 9:
            kind, count = struct.unpack_from("<IQ", data, at)
            fields.extend((at, at + 4))
            at += 12
            for _ in range(count):
                if kind == 8:
                    string()
                else:
                    at += sizes[kind]
        else:
            fields.append(at)
            at += sizes[kind]
    for _ in range(num_tensors):
        string()
        (num_dimensions,) = struct.unpack_from("<I", data, at)
        fields.extend(range(at, at + 4 + 8 * num_dimensions + 12, 4))
        at += 4 + 8 * num_dimensions + 12
    return fields, at


def write_damaged(files: list[Path], directory: Path, rng: random.Random) -> Path:
    """Write the files of a model to `directory`, one of them damaged, and return the first one's path."""
    chosen = rng.randrange(len(files))
    for number, file in enumerate(files):
        data, name = file.read_bytes(), file.name
        if number == chosen:
            fields, header_bytes = structure(data)
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                chance = rng.random()
                if chance < 0.25:
                    data = with_scales(data, rng, header_bytes)
                else:
                    data = at_fields(data, rng, fields) if chance < 0.6 else damaged(data, rng, header_bytes)
            if len(files) > 1 and rng.random() < 0.2:
                name = rng.choice((files[0].name, files[-1].name, "model-00001-of-99999.gguf", "model.gguf"))
        (directory / name).write_bytes(data)
    return directory / files[0].name


def run(count: int, seed: int, directory: Path) -> tuple[Counter[str], list[str], float]:
    """Read `count` damaged files. Returns how many ended how, what went wrong, and the longest time in seconds."""
    rng = random.Random(seed)
    models = make_models(directory)
    ends: Counter[str] = Counter()
    failures: list[str] = []
    longest_s = 0.0
    for number in range(count):
        with tempfile.TemporaryDirectory(dir=directory) as name:
            path = write_damaged(rng.choice(models), Path(name), rng)
            start_s = time.monotonic()
            try:
                read_all(path)
                ends["read"] += 1
            except (InvalidCheckpoint, InvalidConfig) as error:
                ends["refused"] += 1
                if name not in str(error):
                    failures.append(f"{number}: the error doesn't name the file: {error}")
            except Exception as error:  # that is what is looked for
                failures.append(f"{number}: {type(error).__name__}: {error}")
            took_s = time.monotonic() - start_s
            longest_s = max(longest_s, took_s)
            if took_s > MAX_S:
                failures.append(f"{number}: took {took_s:.1f} s")
    return ends, failures, longest_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        for files in make_models(Path(directory) / "first"):  # what a sound file takes
            read_all(files[0])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ends, failures, longest_s = run(args.count, args.seed, Path(directory))
        added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    print(f"{args.count} files: {ends['refused']} refused, {ends['read']} read; the longest took {longest_s:.2f} s")
    print(f"memory: {added} MiB more than sound files take")
    for failure in failures[:20]:
        print(failure)
    if failures or added > MAX_MIB:
        raise SystemExit(f"{len(failures)} failures")


if __name__ == "__main__":
    main()
