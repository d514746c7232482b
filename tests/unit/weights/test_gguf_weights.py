"""Weights from GGUF files are those of the checkpoints that transformers reads."""

from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from families import make_checkpoint
from native_kernels import needs_kernels

from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stages import Stage
from raycore.checkpoint.stored_model import fit_model
from raycore.checkpoint.weight_files import stored_tensors
from raycore.decoder.decoder import Decoder, embed
from raycore.errors import InvalidCheckpoint
from raycore.layers.native_operations import NativeOperations
from raycore.layers.operations import Operations
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.weights.gguf_slice import GgufMapping
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.linear_formats import CONVERTED, STORED_INTEGERS, LinearFormats
from raycore.weights.loader import load_decoder_weights
from raycore.weights.named import named_weights
from raycore.weights.share import WeightShare

gguf_files = pytest.importorskip("gguf_files", reason="needs the extra gguf")

WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Rows of whole blocks of every type."""
NOT_COMPARED = ("fitted_to", "quantization")
"""Fields of a spec that depend on how the tensors are stored."""


def load(path: Path, rank: int = 0, size: int = 1, stage: Stage | None = None) -> dict[str, torch.Tensor]:
    share = WeightShare(fit_model(load_model_spec(path), path), torch.float32, rank, size, stage)
    return dict(named_weights(load_decoder_weights(share, path)))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        # Gemma's norms, to whose weights 1 has been added and subtracted
        tolerance = 1e-6 if "norm" in name else 0.0
        torch.testing.assert_close(weight, expected[name], rtol=0.0, atol=tolerance, msg=name)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.mark.parametrize("family", gguf_files.ARCHITECTURES)
def test_a_family_has_the_weights_and_the_description_of_its_checkpoint(family, directory):
    checkpoint = make_checkpoint(family, directory, **gguf_files.OPTIONS.get(family, {}))
    file = gguf_files.write_gguf(checkpoint, family, directory / f"{family}.gguf", metadata=ends_of(checkpoint))
    assert_same(load(file), load(checkpoint))
    found, expected = (fit_model(load_model_spec(each), each) for each in (file, checkpoint))
    if family not in ("llama3", "hunyuan"):  # the first lists factors, and the second's base is a 32-bit float
        fields = [name for name in found.__struct_fields__ if name not in NOT_COMPARED]
        assert {name: getattr(found, name) for name in fields} == {name: getattr(expected, name) for name in fields}


def ends_of(checkpoint: Path) -> dict[str, int]:
    ids = load_model_spec(checkpoint).eos_token_ids
    names = ("eos", "eot", "eom")
    return {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in zip(names, ids, strict=False)}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_every_type_has_the_numbers_that_the_package_says(kind, directory):
    checkpoint = make_checkpoint("llama2", directory / kind, **WIDE)
    plain = directory / kind / "plain"
    file = gguf_files.write_gguf(checkpoint, "llama2", directory / f"{kind}.gguf", kind, plain=plain)
    assert_same(load(file), load(plain))


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("family", ["llama3", "qwen2", "mixtral", "gemma3", "stablelm", "glm4_moe", "lfm2_moe"])
def test_ranks_and_stages_read_their_parts(family, kind, directory):
    where = directory / f"{family}-{kind}"
    checkpoint = make_checkpoint(family, where, **gguf_files.OPTIONS.get(family, {}) | WIDE)
    file = gguf_files.write_gguf(checkpoint, family, where / "model.gguf", kind, plain=where / "plain")
    for rank in range(2):
        assert_same(load(file, rank, 2), load(where / "plain", rank, 2))
    last = load_model_spec(file).num_layers - 1
    for stage in (Stage(range(1), is_last=False), Stage(range(1, last + 1), is_first=False)):
        assert_same(load(file, stage=stage), load(where / "plain", stage=stage))


@pytest.mark.parametrize("other", ["Q4_0", "Q8_0", "F16"])
def test_files_of_other_types_are_not_read_into_kept_layers(other, directory):
    where = directory / f"other-{other}"
    checkpoint = make_checkpoint("llama2", where, **WIDE)
    first, second = (gguf_files.write_gguf(checkpoint, "llama2", where / f"{k}.gguf", k) for k in ("Q4_1", other))
    with pytest.raises(InvalidCheckpoint, match=f"{other}.gguf is stored as {other}, and the engine keeps"):
        fit_model(load_model_spec(first), second)


def test_parts_of_rows_that_no_block_ends_at(directory):
    """Four ranks have 24 of 96 columns each, and blocks have 32."""
    checkpoint = make_checkpoint("qwen2", directory / "narrow", num_key_value_heads=4)
    plain = directory / "narrow" / "plain"
    file = gguf_files.write_gguf(checkpoint, "qwen2", directory / "narrow.gguf", "Q8_0", plain=plain)
    for rank in range(4):
        assert_same(load(file, rank, 4), load(plain, rank, 4))


def test_a_file_that_has_become_shorter_is_not_read_past_its_end(directory):
    checkpoint = make_checkpoint("llama2", directory / "shorter")
    file = gguf_files.write_gguf(checkpoint, "llama2", directory / "shorter" / "model.gguf")
    last = max(stored_tensors(file).values(), key=lambda tensor: tensor.end)
    file.write_bytes(file.read_bytes()[: last.end - 4])
    with pytest.raises(InvalidCheckpoint, match=r"shorter/model.gguf has .* bytes, and a tensor that ends at byte"):
        GgufMapping(file).slice(last)


def test_a_model_in_several_files(directory):
    checkpoint = make_checkpoint("llama2", directory / "parts")
    file = gguf_files.write_gguf(checkpoint, "llama2", directory / "parts" / "model.gguf", parts=4)
    assert file.name == "model-00001-of-00004.gguf"
    assert_same(load(file), load(checkpoint))


def test_a_description_compared_on_another_node_stays(directory):
    checkpoint = make_checkpoint("llama2", directory / "fitted")
    file = gguf_files.write_gguf(checkpoint, "llama2", directory / "fitted" / "model.gguf")
    spec = fit_model(load_model_spec(file), file)
    assert fit_model(msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=type(spec)), file) == spec


KEPT = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q5_0": 8, "Q5_1": 8, "Q4_K": 4, "Q5_K": 8, "Q6_K": 8}
"""The bits in which types are kept."""


def load_kept(path: Path, rank: int, size: int, dtype: torch.dtype = torch.float32):
    spec = fit_model(load_model_spec(path), path)
    share = WeightShare(spec, dtype, rank, size, formats=STORED_INTEGERS)
    return dict(named_weights(load_decoder_weights(share, path)))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KEPT)
def test_integers_that_stay_are_exactly_the_files_numbers(kind, size, directory):
    where = directory / f"kept-{kind}-{size}"
    checkpoint = make_checkpoint("llama3", where, **WIDE)
    file = gguf_files.write_gguf(checkpoint, "llama3", where / "model.gguf", kind, plain=where / "plain")
    for rank in range(size):
        found, expected = load_kept(file, rank, size), load(where / "plain", rank, size)
        kept = {name: weight for name, weight in found.items() if isinstance(weight, IntegerWeight)}
        assert len(kept) == 4 * 2 + 1  # all linear layers of both layers, and the head, which is the embedding
        for name, weight in kept.items():
            assert weight.bits == KEPT[kind]
            torch.testing.assert_close(weight.dequantize(torch.float32), expected[name], rtol=0, atol=0, msg=name)
        assert_same({name: found[name] for name in found.keys() - kept}, {k: expected[k] for k in found.keys() - kept})


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_experts_that_stay_are_exactly_the_files_numbers(kind, size, directory):
    where = directory / f"experts-{kind}-{size}"
    checkpoint = make_checkpoint("mixtral", where, **WIDE)
    kinds = {"layers.1.mlp.experts.gate_proj": "Q4_0", "layers.0.mlp.experts.down_proj": "Q4_0"}
    file = gguf_files.write_gguf(checkpoint, "mixtral", where / "model.gguf", kind, kinds=kinds, plain=where / "plain")
    for rank in range(size):
        found, expected = load_kept(file, rank, size), load(where / "plain", rank, size)
        (converted,) = (name for name, each in found.items() if isinstance(each, torch.Tensor) and each.dim() == 3)
        assert converted.endswith("layers.1.mlp.experts.gate_up_proj"), "its gates have another type"
        for name, weight in found.items():
            if isinstance(weight, IntegerWeight) and ".experts." in name:
                weight = torch.stack([weight[each].dequantize(torch.float32) for each in range(weight.shape[0])])
                torch.testing.assert_close(weight, expected[name], rtol=0, atol=0, msg=name)


def write_with_head(where: Path, kind: str, *, is_tied: bool) -> Path:
    """Write a GGUF file with an odd number of tokens, and the checkpoint of its numbers in `where / "plain"`."""
    checkpoint = make_checkpoint("llama3", where, **WIDE, vocab_size=207, tie_word_embeddings=is_tied)
    return gguf_files.write_gguf(checkpoint, "llama3", where / "model.gguf", kind, plain=where / "plain")


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", KEPT)
def test_a_head_keeps_its_integers_and_an_embedding_of_its_own_does_not(kind, is_tied, directory):
    where = directory / f"head-{kind}-{is_tied}"
    file = write_with_head(where, kind, is_tied=is_tied)
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    for size in (1, 2):  # the second of two ranks has a row of padding
        for rank in range(size):
            found, expected = load_kept(file, rank, size), load(where / "plain", rank, size)
            assert ("lm_head.weight" in found) != is_tied
            assert isinstance(found[name], IntegerWeight)
            torch.testing.assert_close(found[name].dequantize(torch.float32), expected[name], rtol=0, atol=1e-30)
            if not is_tied:
                torch.testing.assert_close(found["model.embed_tokens.weight"], expected["model.embed_tokens.weight"])


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_embedding_without_its_head_is_converted(is_tied, directory):
    """As in the first stage of several, and in a model that pools."""
    where = directory / f"apart-{is_tied}"
    checkpoint = make_checkpoint("llama3", where, **WIDE, tie_word_embeddings=is_tied)
    file = gguf_files.write_gguf(checkpoint, "llama3", where / "model.gguf", "Q8_0")
    spec = fit_model(load_model_spec(file), file)
    pools = msgspec.structs.replace(spec, pooling=PoolingSpec(tasks=["embed"], embedding_size=256))
    first = Stage(range(1), is_last=False)
    for share in (
        WeightShare(spec, torch.float32, stage=first, formats=STORED_INTEGERS),
        WeightShare(pools, torch.float32, formats=STORED_INTEGERS),
    ):
        weights = load_decoder_weights(share, file)
        assert isinstance(weights.embed_VD, torch.Tensor)
        assert weights.lm_head_VD is None
    last = WeightShare(spec, torch.float32, stage=Stage(range(1, 2), is_first=False), formats=STORED_INTEGERS)
    weights = load_decoder_weights(last, file)
    assert weights.embed_VD is None
    assert isinstance(weights.lm_head_VD, IntegerWeight)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_head_of_other_types_than_the_layers(kind, directory):
    where = directory / f"head-of-{kind}"
    checkpoint = make_checkpoint("llama3", where, **WIDE)
    kinds, plain = {"embed_tokens": kind}, where / "plain"
    file = gguf_files.write_gguf(checkpoint, "llama3", where / "model.gguf", "Q4_1", kinds=kinds, plain=plain)
    found, name = load_kept(file, 0, 1), "model.embed_tokens.weight"
    numbers = found[name] if kind == "F16" else found[name].dequantize(torch.float32)
    torch.testing.assert_close(numbers, load(plain)[name], rtol=0, atol=0)


class OneOfTwo:
    """A tensor-parallel rank whose sums are its own part."""

    size = 2

    def all_reduce_(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers


def make_decoder(
    spec: ModelSpec,
    dtype: torch.dtype,
    path: Path,
    formats: LinearFormats,
    operations: Operations,
    rank: int = 0,
    size: int = 1,
) -> Decoder:
    share = WeightShare(spec, dtype, rank, size, formats=formats)
    return Decoder(spec, load_decoder_weights(share, path), TensorParallel(), operations)


@needs_kernels
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", KEPT)
def test_a_model_computes_with_its_head_in_integers(kind, is_tied, directory):
    where = directory / f"computed-{kind}-{is_tied}"
    file = write_with_head(where, kind, is_tied=is_tied)
    spec = fit_model(load_model_spec(file), file)
    hidden_TD = torch.randn(9, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    tokens_T = torch.tensor([0, 206, 103, 104, 17, 16, 15, 206])
    for dtype, tolerance in ((torch.float32, 2e-4), (torch.bfloat16, 4e-3)):
        decoder = partial(make_decoder, spec, dtype)
        kept = decoder(file, STORED_INTEGERS, NativeOperations(batch_invariant=True))
        plain = decoder(file, CONVERTED, Operations(torch.device("cpu")))
        assert torch.equal(kept.embed(tokens_T), plain.embed(tokens_T))
        logits_TV, expected_TV = (each.logits(hidden_TD.to(dtype)) for each in (kept, plain))
        assert logits_TV.dtype == dtype
        assert (logits_TV - expected_TV).float().norm() < tolerance * expected_TV.float().norm()
        for row, logits_V in enumerate(logits_TV):
            assert torch.equal(kept.logits(hidden_TD[row : row + 1].to(dtype))[0], logits_V)
        outer = kept.outer_weights()
        assert (outer.lm_head_VD is outer.embed_VD) == is_tied
        assert isinstance(outer.lm_head_VD, IntegerWeight)
        assert torch.equal(outer.lm_head_VD.dequantize(dtype), plain.outer_weights().lm_head_VD)
        ranks = [decoder(file, STORED_INTEGERS, NativeOperations(), rank, 2) for rank in range(2)]
        parts = [embed(each._embed_VD, each._vocab_start, tokens_T, OneOfTwo()) for each in ranks]
        assert torch.equal(sum(parts), plain.embed(tokens_T))
        halves_TV = torch.cat([each.logits(hidden_TD.to(dtype)) for each in ranks], dim=1)[:, :207]
        assert torch.equal(halves_TV, logits_TV)


MIXTURES = [
    ("Q4_K", "Q6_K", [(4, "affine", 32), (8, "integer", 16)]),  # Q4_K_M
    ("Q5_K", "Q6_K", [(8, "affine", 32), (8, "integer", 16)]),  # Q5_K_M
    ("Q5_0", "Q8_0", [(8, "integer", 32)]),  # what they become where rows have no whole blocks of 256
    ("Q4_0", "Q5_0", [(4, "integer", 32), (8, "integer", 32)]),
    ("Q4_1", "Q4_0", [(4, "affine", 32), (4, "integer", 32)]),
]
"""The types of q and k and of v, and the forms of the parts of the three together: bits, code and group size."""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("kind", "other", "forms"), MIXTURES)
def test_layers_whose_parts_have_several_types_keep_all_of_them_exactly(kind, other, forms, size, directory):
    where = directory / f"mixed-{kind}-{other}-{size}"
    checkpoint = make_checkpoint("llama3", where, **WIDE)
    kinds, plain = {"v_proj": other, "up_proj": other}, where / "plain"
    file = gguf_files.write_gguf(checkpoint, "llama3", where / "model.gguf", kind, kinds=kinds, plain=plain)
    for rank in range(size):
        found, expected = load_kept(file, rank, size), load(plain, rank, size)
        for name in (each for each in found if "_proj" in each):
            weight = found[name]
            parts = weight.parts if isinstance(weight, IntegerParts) else [weight]
            assert [(part.bits, part.code, part.group_size) for part in parts] == (
                forms if "qkv" in name or "gate_up" in name else forms[:1]
            )
            torch.testing.assert_close(weight.dequantize(torch.float32), expected[name], rtol=0, atol=0, msg=name)


def test_layers_of_which_a_part_has_plain_numbers_are_converted(directory):
    where = directory / "partly"
    checkpoint = make_checkpoint("llama3", where, **WIDE)
    file = gguf_files.write_gguf(
        checkpoint, "llama3", where / "model.gguf", "Q4_K", kinds={"v_proj": "F16"}, plain=where / "plain"
    )
    found, expected = load_kept(file, 0, 1), load(where / "plain")
    converted = {name: weight for name, weight in found.items() if isinstance(weight, torch.Tensor)}
    assert {name for name in converted if "_proj" in name} == {
        f"model.layers.{layer}.self_attn.qkv_proj.weight" for layer in range(2)
    }
    assert_same(converted, {name: expected[name] for name in converted})


def test_types_that_are_not_quantized_are_not_kept(directory):
    where = directory / "half"
    checkpoint = make_checkpoint("llama2", where, **WIDE)
    file = gguf_files.write_gguf(checkpoint, "llama2", where / "model.gguf", "F16")
    assert load_model_spec(file).quantization is None
    assert not any(isinstance(weight, IntegerWeight) for weight in load_kept(file, 0, 1).values())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_parts_of_groups_that_kernels_lack_are_converted(kind, directory):
    """A quarter of 96 columns is 24, which groups of 32 and the kernels' least of 16 don't divide."""
    where = directory / f"odd-{kind}"
    checkpoint = make_checkpoint("qwen2", where, num_key_value_heads=4)
    file = gguf_files.write_gguf(checkpoint, "qwen2", where / "model.gguf", kind, plain=where / "plain")
    for rank in range(4):
        found, expected = load_kept(file, rank, 4), load(where / "plain", rank, 4)
        down = found["model.layers.0.mlp.down_proj.weight"]
        assert isinstance(down, torch.Tensor) or down.group_size in (16, 32)
        for name, weight in found.items():
            numbers = weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)
            torch.testing.assert_close(numbers, expected[name], rtol=0, atol=0, msg=name)
