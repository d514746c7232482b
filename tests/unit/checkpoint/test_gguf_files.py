"""GGUF files are read as their checkpoints are, and damaged or unknown ones are refused by name."""

import math
import struct
from pathlib import Path

import pytest
from families import make_checkpoint

from raycore.checkpoint.gguf.header import read_gguf, shortest_float
from raycore.checkpoint.hub_cache import find_directory
from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.checkpoint.weight_files import has_weight_files, stored_tensors
from raycore.config import resolve
from raycore.errors import InvalidCheckpoint, InvalidConfig, InvalidInput
from raycore.parts.adapters.checkpoint.spec import LoraSpec

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

from fuzz.gguf_files import make_models, read_all, run, tokenizer_metadata  # noqa: E402
from gguf_files import ARCHITECTURES, OPTIONS, write_gguf  # noqa: E402  # they need gguf


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint("llama2", tmp_path_factory.mktemp("checkpoint"))


def written(checkpoint: Path, path: Path, family: str = "llama2", **metadata) -> Path:
    return write_gguf(checkpoint, family, path / "model.gguf", metadata=metadata)


def changed(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old) >= 1
    path.write_bytes(data.replace(old, new, 1))
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises((InvalidCheckpoint, InvalidConfig)) as caught:
        fit_model(load_model_spec(path), path)
    for word in (str(path), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("number", [1e-5, 1e-6, 0.1, 10000.0, 1 / 3, 3.3e38, 123456789.0, 1e-45])
def test_a_number_of_32_bits_is_the_shortest_that_rounds_to_it(number):
    (stored,) = struct.unpack("<f", struct.pack("<f", number))
    found = shortest_float(stored)
    assert struct.pack("<f", found) == struct.pack("<f", number)
    assert len(repr(found)) <= len(repr(stored))
    if number != 1 / 3:
        assert found == pytest.approx(number, rel=1e-7) or number < 1e-40


def test_numbers_that_only_metadata_have_become_config_json(checkpoint, tmp_path):
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    path = written(checkpoint, tmp_path, **sampling, **{"tokenizer.ggml.bos_token_id": 3})
    spec = load_model_spec(path)
    assert spec.generation_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert spec.bos_token_id == 3
    assert spec.dtype == "float32"


def test_vllms_options_for_gguf_files_are_taken(checkpoint, tmp_path):
    """A directory with nothing else is the file, and has its tokenizer."""
    path = written(checkpoint, tmp_path, **tokenizer_metadata(208))
    for options in ({"quantization": "gguf"}, {"load_format": "gguf"}, {"quantization": "gguf", "tokenizer": tmp_path}):
        found = resolve(str(tmp_path), **options).model
        assert (found.model, found.tokenizer, found.quantization, found.load_format) == (*[str(path)] * 2, None, "auto")
    with pytest.raises(InvalidConfig, match=r"load_format='sharded_state', but .*model\.gguf is a GGUF file"):
        resolve(str(path), load_format="sharded_state")
    with pytest.raises(InvalidConfig, match=r"quantization='awq', but .*says that its weights are stored as 'gguf'"):
        resolve(str(path), quantization="awq")


def test_tokens_that_end_answers_end_outputs(checkpoint, tmp_path):
    tokens = ["<eos>", "<|im_end|>", "<|eot_id|>", *map(str, range(205))]
    lists = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 1, *[1] * 205]}
    path = written(checkpoint, tmp_path, **lists, **{"tokenizer.ggml.eos_token_id": 0})
    assert load_model_spec(path).eos_token_ids == [0, 1]  # the third is an ordinary token


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "linear", "factor": 8.0}, ("linear", 8.0, 0, 1.0)),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, ("yarn", 4.0, 64, 1.138629)),
    ],
)
def test_a_scaled_rotation_is_that_of_the_checkpoint(scaling, expected, tmp_path):
    rope = scaling | {"rope_theta": 10000.0}
    checkpoint = make_checkpoint("llama2", tmp_path, rope_parameters=rope)
    found = load_model_spec(written(checkpoint, tmp_path)).rotations[0].scaling
    name, factor, original, attention = expected
    assert (found.rope_type, found.factor, found.original_max_position_embeddings) == (name, factor, original)
    assert math.isclose(found.attention_factor, attention, rel_tol=1e-5)
    assert found == load_model_spec(checkpoint).rotations[0].scaling


def test_llama_3s_scaling_is_found_in_its_factors(tmp_path):
    rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    checkpoint = make_checkpoint("llama3", tmp_path, rope_parameters=rope, head_dim=64)
    path = written(checkpoint, tmp_path, "llama3")
    assert load_model_spec(path).rotations == load_model_spec(checkpoint).rotations


def test_other_factors_stay_a_list(tmp_path):
    checkpoint = make_checkpoint("llama3", tmp_path)
    path = written(checkpoint, tmp_path, "llama3")
    scaling = load_model_spec(path).rotations[0].scaling
    assert scaling.rope_type == "longrope"
    assert scaling.short_factors == scaling.long_factors
    assert max(scaling.short_factors) == pytest.approx(8.0)


def test_an_unknown_architecture_is_refused_by_name(checkpoint, tmp_path):
    path = changed(written(checkpoint, tmp_path), b"llama", b"mamba")
    refused(path, "general.architecture='mamba'", "llama, qwen2")


@pytest.mark.parametrize(
    ("architecture", "kind", "words"),
    [
        ("llama", "adapter", ["is a LoRA adapter", "--lora-modules NAME=FILE"]),
        ("clip", "mmproj", ["is what brings images to a model", "give the file of a model"]),
        ("clip", None, ["is what brings images to a model", "general.architecture='clip'"]),
        ("", "imatrix", ["is an importance matrix", "give the file of a model"]),
        ("controlvector", None, ["is a control vector"]),
        ("bert", "model", ["is a text encoder", "give the directory of its checkpoint"]),
        ("llama", "other", ["general.type='other': expected 'model'"]),
        ("llama", "model", ["has a vocabulary and no tensors", "the option tokenizer"]),
    ],
)
def test_files_that_are_no_models_are_refused_with_what_to_give(architecture, kind, words, tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    if kind is not None:
        writer.add_type(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(path, *words)


def test_an_unknown_type_is_refused_by_name(checkpoint, tmp_path):
    path = written(checkpoint, tmp_path)
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 2 * 8
    data[at : at + 4] = struct.pack("<I", gguf.GGMLQuantizationType.IQ4_XS)
    path.write_bytes(data)
    refused(path, "tensor blk.0.attn_q.weight is stored as IQ4_XS", "F32, F16, Q4_0")


def test_an_unknown_tensor_is_refused_by_name(checkpoint, tmp_path):
    path = changed(written(checkpoint, tmp_path), b"blk.1.attn_q.", b"blk.1.attn_x.")
    refused(path, "blk.1.attn_x.weight", "general.architecture='llama'")


def test_a_missing_tensor_is_named(checkpoint, tmp_path):
    path = changed(written(checkpoint, tmp_path), b"blk.1.attn_q.", b"blk.3.attn_q.")
    refused(path, "model.layers.1.self_attn.q_proj.weight", "the weights and metadata are of different models")


def test_a_model_that_transformers_code_would_compute_is_refused(checkpoint, tmp_path):
    path = written(checkpoint, tmp_path)
    with pytest.raises(InvalidConfig, match=r"model_impl='transformers' can't be used with .*model\.gguf"):
        load_model_spec(path, "transformers")


def test_without_the_package_quantized_tensors_are_refused(checkpoint, tmp_path, monkeypatch):
    import importlib.util

    plain = written(checkpoint, tmp_path)
    quantized = write_gguf(checkpoint, "llama2", tmp_path / "quantized.gguf", "Q8_0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert len(read_gguf(plain).tensors) == 21
    with pytest.raises(InvalidConfig, match=r'pip install "raycore\[gguf\]"'):
        read_gguf(quantized)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"GGUF", b"GGML", ["begins with b'GGML'"]),
        (b"GGUF\x03\0\0\0", b"GGUF\x01\0\0\0", ["version 1"]),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", ["the other order of bytes"]),
        (b"llama.block_count", b"llama.block_cound", ["llama.block_count is missing"]),
        (b"blk.0.attn_k.weight", b"blk.0.attn_q.weight", ["blk.0.attn_q.weight twice"]),
    ],
)
def test_a_damaged_header_is_refused(old, new, words, checkpoint, tmp_path):
    refused(changed(written(checkpoint, tmp_path), old, new), *words)


def test_every_truncation_is_refused(checkpoint, tmp_path):
    path = written(checkpoint, tmp_path)
    data = path.read_bytes()
    for length in [*range(0, 4000, 7), len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:length])
        refused(path)


class TestParts:
    @pytest.fixture
    def parts(self, checkpoint, tmp_path) -> list[Path]:
        write_gguf(checkpoint, "llama2", tmp_path / "model.gguf", parts=3)
        return sorted(tmp_path.glob("*.gguf"))

    def test_a_model_has_the_tensors_of_all_its_files(self, parts):
        assert len(stored_tensors(parts[0])) == 21
        assert {tensor.file for tensor in stored_tensors(parts[0]).values()} == set(parts)

    def test_another_file_than_the_first_is_refused(self, parts):
        refused(parts[1], "model-00001-of-00003.gguf")

    def test_a_missing_file_is_named(self, parts):
        parts[2].unlink()
        with pytest.raises(InvalidCheckpoint, match=r"lacks 1 of the 3 files .* model-00003-of-00003\.gguf"):
            read_gguf(parts[0])

    def test_a_file_under_another_name_is_refused(self, parts):
        refused(parts[0].rename(parts[0].with_name("other.gguf")), "split.count=3", "NAME-00001-of-0000N.gguf")

    def test_a_directory_without_the_first_file_is_refused_with_its_name(self, parts):
        parts[0].unlink()
        with pytest.raises(InvalidCheckpoint, match=r"lacks the first file of its model, model-00001-of-00003\.gguf"):
            find_directory(str(parts[0].parent))

    def test_the_suffix_may_be_in_capitals(self, parts):
        renamed = [each.rename(each.with_suffix(".GGUF")) for each in parts]
        assert find_directory(str(parts[0].parent)) == renamed[0]
        assert {tensor.file for tensor in stored_tensors(renamed[0]).values()} == set(renamed)

    def test_files_that_are_the_same_are_refused(self, parts):
        parts[2].write_bytes(parts[1].read_bytes())
        with pytest.raises(InvalidCheckpoint, match=r"model-00003-of-00003\.gguf: split\.no=1: expected 2"):
            read_gguf(parts[0])

    def test_files_without_one_tensor_are_refused(self, parts):
        changed(parts[0], struct.pack("<i", 21), struct.pack("<i", 22))
        with pytest.raises(InvalidCheckpoint, match=r"split\.tensors\.count=22, but the 3 files have 21"):
            read_gguf(parts[0])


def test_a_file_is_found_by_its_name(checkpoint, tmp_path):
    path = written(checkpoint, tmp_path)
    assert find_directory(str(path)) == path
    assert has_weight_files(path)
    with pytest.raises(InvalidCheckpoint, match=r"nothing\.gguf': there is no such file"):
        find_directory(str(tmp_path / "nothing.gguf"))


@pytest.mark.parametrize("name", ["model.bin", "model"])
def test_a_file_that_isnt_called_gguf_is_no_name_on_the_hub(name, checkpoint, tmp_path, monkeypatch):
    """Whether it is a model, a tokenizer, a draft model, an adapter, or what a running engine reloads."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("owner").mkdir()
    path = written(checkpoint, tmp_path).rename(tmp_path / "owner" / name)
    config = {"model": f"owner/{name}", "num_speculative_tokens": 2}
    for read in (
        lambda: find_directory(f"owner/{name}"),
        lambda: find_directory(f"owner/{name}", "tokenizer.json", of="tokenizer"),
        lambda: resolve(str(checkpoint), speculative_config=config),
        lambda: LoraSpec.read(path, load_model_spec(checkpoint), 16),
        lambda: stored_tensors(path),
    ):
        with pytest.raises(InvalidInput, match=rf"{name}'? is a GGUF file whose name doesn't end with \.gguf: rename"):
            read()
    path.write_bytes(b"other")
    with pytest.raises(InvalidCheckpoint, match=rf"model='owner/{name}' is a file: give a directory, or a GGUF file"):
        find_directory(f"owner/{name}")


def test_a_directory_with_a_projector_alone_has_no_model(checkpoint, tmp_path):
    file = written(checkpoint, tmp_path)
    projector = file.rename(tmp_path / "mmproj-model-f16.gguf")
    with pytest.raises(InvalidCheckpoint, match=r"has no model, only mmproj-model-f16\.gguf: give"):
        find_directory(str(tmp_path))
    with pytest.raises(InvalidCheckpoint, match=r"no safetensors files: give the path of a GGUF file, such as mmproj"):
        stored_tensors(tmp_path)
    # a driver may have only the small files
    (tmp_path / "config.json").write_text("{}")
    assert find_directory(str(tmp_path)) == tmp_path == projector.parent


def test_metadata_are_named_where_a_directory_has_config_json(checkpoint, tmp_path):
    path = written(checkpoint, tmp_path)
    spec = load_model_spec(path, overrides={"num_hidden_layers": 1})
    with pytest.raises(InvalidCheckpoint, match=r"the files have 2 layers, and metadata has num_hidden_layers=1"):
        fit_model(spec, path)


def test_damaged_files_are_refused(tmp_path):
    """tests/fuzz/gguf_files.py reads more of them."""
    for files in make_models(tmp_path / "sound"):
        read_all(files[0])
    ends, failures, _ = run(80, 1, tmp_path)
    assert failures == []
    assert ends["refused"] > 40


def test_the_fuzz_notices_what_it_looks_for(tmp_path, monkeypatch):
    """An exception that isn't an error for users counts as a failure."""
    from fuzz import gguf_files as fuzzed

    def fail(path: Path) -> None:
        raise ValueError("other")

    monkeypatch.setattr(fuzzed, "read_all", fail)
    assert len(run(3, 0, tmp_path)[1]) == 3


def test_families_are_written_as_the_package_names_them():
    assert OPTIONS.keys() <= ARCHITECTURES.keys()
