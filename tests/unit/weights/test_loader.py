"""Which part of a checkpoint each tensor-parallel rank gets, and what is said of checkpoints that don't fit."""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from raycore.checkpoint.stages import Stage, split_layers
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.models.rotation import Rotation
from raycore.models.spec import ModelSpec
from raycore.weights.checkpoint_reader import CheckpointReader
from raycore.weights.loader import DecoderWeights, load_decoder_weights, random_decoder_weights
from raycore.weights.share import WeightShare
from raycore.weights.staging import Staging

HEAD = 4
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=13,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=HEAD,
    rms_norm_eps=1e-5,
    rotations=[Rotation(10000.0)] * 2,
    layer_windows=[None, None],
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm="heads",
    sinks=True,
    tie_word_embeddings=False,
    max_position_embeddings=64,
    dtype="bfloat16",
    bos_token_id=None,
    eos_token_ids=[2],
    generation_defaults={},
)
PLAIN = msgspec.structs.replace(SPEC, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=None, sinks=False)
TIED = msgspec.structs.replace(PLAIN, tie_word_embeddings=True)

Tensors = dict[str, torch.Tensor]


def make_tensors(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """A checkpoint's tensors under transformers' names. Every element of every tensor is another number."""
    q, kv, hidden, ff = spec.num_heads * HEAD, spec.num_kv_heads * HEAD, spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (spec.vocab_size, hidden),
    }
    if spec.head_bias:
        shapes["lm_head.bias"] = (spec.vocab_size,)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for name, num_rows, num_columns, has_bias in (
            ("self_attn.q_proj", q, hidden, spec.qkv_bias),
            ("self_attn.k_proj", kv, hidden, spec.qkv_bias),
            ("self_attn.v_proj", kv, hidden, spec.qkv_bias),
            ("self_attn.o_proj", hidden, q, spec.o_bias),
            ("mlp.gate_proj", ff, hidden, spec.mlp_bias),
            ("mlp.up_proj", ff, hidden, spec.mlp_bias),
            ("mlp.down_proj", hidden, ff, spec.mlp_bias),
        ):
            shapes[f"{prefix}{name}.weight"] = (num_rows, num_columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (num_rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        if spec.sinks:
            shapes[f"{prefix}self_attn.sinks"] = (spec.num_heads,)
        if spec.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = shapes[f"{prefix}self_attn.k_norm.weight"] = (HEAD,)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(path: Path, tensors: Tensors) -> None:
    save_file(tensors, path / "model.safetensors")


def write_in_two(path: Path, tensors: Tensors) -> None:
    names = list(tensors)
    weight_map = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load_all(spec: ModelSpec, path: Path, tp_size: int, dtype: torch.dtype = torch.bfloat16) -> list[DecoderWeights]:
    return [load_decoder_weights(WeightShare(spec, dtype, tp_rank, tp_size), path) for tp_rank in range(tp_size)]


def staged(device: str = "cpu") -> Staging:
    """Buffers so small that they are used again and again, and that a few rows don't fit."""
    return Staging(torch.device(device), buffer_bytes=100)


def flat(weights: DecoderWeights) -> list[torch.Tensor]:
    """All tensors of a rank, in a fixed order."""
    parts = [part for layer in weights.layers for part in (*vars(layer).values(), *vars(layer.feed_forward).values())]
    by_layer = [part for part in parts if isinstance(part, torch.Tensor)]
    return [weights.embed_VD, weights.lm_head_VD, weights.final_norm_D, *by_layer]


def equal(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return found is not None and found.dtype == expected.dtype and torch.equal(found, expected)


def test_a_single_rank_loads_every_tensor(tmp_path: Path) -> None:
    tensors = make_tensors(SPEC)
    write(tmp_path, tensors)
    (weights,) = load_all(SPEC, tmp_path, 1)
    assert equal(weights.embed_VD, tensors["model.embed_tokens.weight"])
    assert equal(weights.lm_head_VD, tensors["lm_head.weight"])
    assert equal(weights.final_norm_D, tensors["model.norm.weight"])
    assert weights.vocab_start == 0
    for index, layer in enumerate(weights.layers):
        of_layer = {name.removeprefix(f"model.layers.{index}."): tensor for name, tensor in tensors.items()}

        def fused(kind: str, *names: str, of_layer: Tensors = of_layer) -> torch.Tensor:
            return torch.cat([of_layer[f"{name}.{kind}"] for name in names])

        qkv, gate_up = [f"self_attn.{name}_proj" for name in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
        assert equal(layer.mixer.qkv_OD, fused("weight", *qkv))
        assert equal(layer.mixer.qkv_bias_O, fused("bias", *qkv))
        assert equal(layer.feed_forward.gate_up_FD, fused("weight", *gate_up))
        assert equal(layer.feed_forward.gate_up_bias, fused("bias", *gate_up))
        for found, name in (
            (layer.mixer.o_DO, "self_attn.o_proj.weight"),
            (layer.mixer.o_bias, "self_attn.o_proj.bias"),
            (layer.mixer.q_norm_H, "self_attn.q_norm.weight"),
            (layer.mixer.k_norm_H, "self_attn.k_norm.weight"),
            (layer.mixer.sinks_N, "self_attn.sinks"),
            (layer.feed_forward.down_DF, "mlp.down_proj.weight"),
            (layer.feed_forward.down_bias, "mlp.down_proj.bias"),
            (layer.before_attention_D, "input_layernorm.weight"),
            (layer.before_feed_forward_D, "post_attention_layernorm.weight"),
        ):
            assert equal(found, of_layer[name]), name


@pytest.mark.parametrize("tp_size", [2, 4])
def test_tensor_parallel_ranks_together_hold_every_tensor_once(tmp_path: Path, tp_size: int) -> None:
    write(tmp_path, make_tensors(SPEC))
    (whole,) = load_all(SPEC, tmp_path, 1)
    ranks = load_all(SPEC, tmp_path, tp_size)
    num_kv = max(1, SPEC.num_kv_heads // tp_size) * HEAD
    num_q, num_ff = SPEC.num_heads // tp_size * HEAD, SPEC.intermediate_size // tp_size
    copies = max(1, tp_size // SPEC.num_kv_heads)
    for index, layer in enumerate(whole.layers):
        parts = [rank.layers[index] for rank in ranks]
        for name in ("qkv_OD", "qkv_bias_O"):
            q, k, v = zip(*(getattr(part.mixer, name).split([num_q, num_kv, num_kv]) for part in parts), strict=True)
            assert equal(torch.cat([*q, *k[::copies], *v[::copies]]), getattr(layer.mixer, name))
            for tp_rank in range(tp_size):
                assert torch.equal(k[tp_rank], k[tp_rank - tp_rank % copies]), "neighbours share a head"
        for name in ("feed_forward.gate_up_FD", "feed_forward.gate_up_bias"):
            get = attrgetter(name)
            gate, up = zip(*(get(part).split(num_ff) for part in parts), strict=True)
            assert equal(torch.cat([*gate, *up]), get(layer))
        assert equal(torch.cat([part.mixer.sinks_N for part in parts]), layer.mixer.sinks_N)
        for name in ("mixer.o_DO", "feed_forward.down_DF"):
            get = attrgetter(name)
            assert equal(torch.cat([get(part) for part in parts], dim=1), get(layer))
        for name in ("mixer.o_bias", "feed_forward.down_bias"):
            get = attrgetter(name)
            assert equal(get(parts[0]), get(layer))
            assert all(get(part) is None for part in parts[1:]), "else the sum would count it twice"


@pytest.mark.parametrize(("tp_size", "rows"), [(1, 13), (2, 7), (4, 4)])
def test_the_vocabulary_is_padded_with_zeros_for_the_ranks(tmp_path: Path, tp_size: int, rows: int) -> None:
    spec = msgspec.structs.replace(PLAIN, head_bias=True)
    tensors = make_tensors(spec)
    write(tmp_path, tensors)
    ranks = load_all(spec, tmp_path, tp_size)
    assert [rank.vocab_start for rank in ranks] == [tp_rank * rows for tp_rank in range(tp_size)]
    fields = {"model.embed_tokens.weight": "embed_VD", "lm_head.weight": "lm_head_VD", "lm_head.bias": "head_bias_V"}
    for name, of_rank in fields.items():
        whole = torch.cat([getattr(rank, of_rank) for rank in ranks])
        assert equal(whole[:13], tensors[name])
        assert whole.shape[0] == rows * tp_size
        assert not whole[13:].any()


def test_a_rank_may_hold_only_padding_of_the_vocabulary(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(PLAIN, vocab_size=5)
    write(tmp_path, make_tensors(spec))
    last = load_decoder_weights(WeightShare(spec, torch.float32, 3, 4), tmp_path)
    assert last.vocab_start == 6
    assert last.embed_VD.shape == (2, 8)
    assert not last.embed_VD.any()


@pytest.mark.parametrize("has_lm_head", [True, False])
def test_tied_embeddings_are_one_tensor(tmp_path: Path, has_lm_head: bool) -> None:
    tensors = make_tensors(TIED)
    if not has_lm_head:
        del tensors["lm_head.weight"]
    write(tmp_path, tensors)
    (weights,) = load_all(TIED, tmp_path, 1)
    assert weights.lm_head_VD is weights.embed_VD
    assert equal(weights.embed_VD, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("spec", [SPEC, TIED])
@pytest.mark.parametrize("is_random", [False, True])
def test_a_stage_loads_only_its_own_layers(tmp_path: Path, spec: ModelSpec, is_random: bool) -> None:
    write(tmp_path, make_tensors(spec))

    def load(stage: Stage | None) -> DecoderWeights:
        if is_random:
            return random_decoder_weights(WeightShare(spec, torch.float32, 1, 2, stage=stage))
        return load_decoder_weights(WeightShare(spec, torch.float32, 1, 2, stage=stage), tmp_path)

    whole, (first, last) = load(None), map(load, split_layers(spec, 2, [1, spec.num_layers - 1]))
    assert equal(first.embed_VD, whole.embed_VD)
    assert first.lm_head_VD is first.final_norm_D is last.embed_VD is None
    assert equal(last.lm_head_VD, whole.lm_head_VD), "even if it is the embedding"
    assert equal(last.final_norm_D, whole.final_norm_D)
    assert (len(first.layers), len(last.layers)) == (1, spec.num_layers - 1)
    for layer, of_whole in zip([*first.layers, *last.layers], whole.layers, strict=True):
        assert equal(layer.mixer.qkv_OD, of_whole.mixer.qkv_OD)
        assert equal(layer.feed_forward.down_DF, of_whole.feed_forward.down_DF)


def test_a_stage_reads_no_tensor_of_other_stages(tmp_path: Path) -> None:
    """The other stages' tensors need not be there: a node may hold only those that its workers need."""
    tensors = {name: tensor for name, tensor in make_tensors(PLAIN).items() if name.startswith("model.layers.1.")}
    write(tmp_path, tensors)
    stage = Stage(range(1, 2), is_first=False, is_last=False)
    weights = load_decoder_weights(WeightShare(PLAIN, torch.bfloat16, stage=stage), tmp_path)
    assert equal(weights.layers[0].mixer.o_DO, tensors["model.layers.1.self_attn.o_proj.weight"])


def test_a_model_without_biases_is_loaded_without_biases(tmp_path: Path) -> None:
    write(tmp_path, make_tensors(PLAIN))
    layer = load_all(PLAIN, tmp_path, 1)[0].layers[0]
    mixer, own = layer.mixer, layer.feed_forward
    assert mixer.qkv_bias_O is mixer.o_bias is own.gate_up_bias is own.down_bias is None
    assert mixer.q_norm_H is mixer.k_norm_H is None


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_converted_to_the_dtype_while_they_are_read(tmp_path: Path, stored: torch.dtype) -> None:
    tensors = make_tensors(PLAIN, stored)
    write(tmp_path, tensors)
    weights = load_decoder_weights(WeightShare(PLAIN, torch.float32, 1, 2), tmp_path)
    assert equal(weights.layers[1].feed_forward.down_DF, tensors["model.layers.1.mlp.down_proj.weight"][:, 8:].float())
    assert {tensor.dtype for tensor in flat(weights)} == {torch.float32}
    assert all(tensor.is_contiguous() for tensor in flat(weights))


def test_weights_in_several_files_equal_those_in_one(tmp_path: Path) -> None:
    tensors = make_tensors(SPEC)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    write(one, tensors)
    write_in_two(two, tensors)
    for from_one, from_two in zip(load_all(SPEC, one, 2), load_all(SPEC, two, 2), strict=True):
        assert all(equal(a, b) for a, b in zip(flat(from_one), flat(from_two), strict=True))


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["all biases", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_staged_weights_equal_those_read_directly(
    tmp_path: Path, spec: ModelSpec, dtype: torch.dtype, tp_size: int
) -> None:
    write(tmp_path, make_tensors(spec))
    for tp_rank in range(tp_size):
        direct = load_decoder_weights(WeightShare(spec, dtype, tp_rank, tp_size), tmp_path)
        found = load_decoder_weights(WeightShare(spec, dtype, tp_rank, tp_size), tmp_path, staging=staged())
        assert all(equal(a, b) for a, b in zip(flat(found), flat(direct), strict=True))
        assert (found.lm_head_VD is found.embed_VD) == spec.tie_word_embeddings


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_on_a_gpu_equal_those_on_a_cpu(tmp_path: Path) -> None:
    write(tmp_path, make_tensors(SPEC))
    gpu = torch.device("cuda", 0)
    direct = load_decoder_weights(WeightShare(SPEC, torch.float16, 1, 2), tmp_path)
    for staging in (None, staged("cuda:0")):
        found = load_decoder_weights(WeightShare(SPEC, torch.float16, 1, 2, device=gpu), tmp_path, staging=staging)
        assert all(equal(a.cpu(), b) for a, b in zip(flat(found), flat(direct), strict=True))


def test_loaded_weights_are_writable_and_outlive_their_files(tmp_path: Path) -> None:
    tensors = make_tensors(PLAIN)
    write(tmp_path, tensors)
    (weights,) = load_all(PLAIN, tmp_path, 1)
    (tmp_path / "model.safetensors").unlink()
    weights.embed_VD.add_(1.0)
    assert equal(weights.embed_VD, tensors["model.embed_tokens.weight"] + 1.0)


def test_loading_progress_counts_every_tensor(tmp_path: Path) -> None:
    write(tmp_path, make_tensors(PLAIN))
    seen: list[tuple[int, int]] = []
    load_decoder_weights(WeightShare(PLAIN, torch.float32), tmp_path, lambda done, total: seen.append((done, total)))
    total = 3 + 9 * PLAIN.num_layers
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_loading_leaves_torchs_number_of_threads_unchanged(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    write(tmp_path, make_tensors(PLAIN))
    load_all(PLAIN, tmp_path, 1)
    with pytest.raises(InvalidCheckpoint):
        load_decoder_weights(WeightShare(SPEC, torch.float32), tmp_path)
    assert torch.get_num_threads() == before


def test_the_checkpoint_reader_reads_parts_of_a_tensor(tmp_path: Path) -> None:
    tensors = make_tensors(PLAIN)
    name = "model.embed_tokens.weight"
    write(tmp_path, tensors)
    with CheckpointReader(tmp_path) as reader:
        assert reader.shape(name) == (13, 8)
        assert equal(reader.read(name, (13, 8), torch.bfloat16), tensors[name])
        assert equal(reader.read(name, (13, 8), torch.bfloat16, dim=0, start=5, length=3), tensors[name][5:8])
        assert equal(reader.read(name, (13, 8), torch.float32, dim=1, start=6), tensors[name][:, 6:].float())


def check_refused(path: Path, fragments: list[str], spec: ModelSpec = PLAIN) -> None:
    for staging in (None, staged()):
        with pytest.raises(InvalidCheckpoint) as raised:
            load_decoder_weights(WeightShare(spec, torch.float32, 0, 2), path, staging=staging)
        for fragment in fragments:
            assert fragment in str(raised.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    check_refused(tmp_path, [str(tmp_path), "model.safetensors", "model.safetensors.index.json", "no weights at all"])
    (tmp_path / "pytorch_model.bin").touch()
    check_refused(tmp_path, ["has its weights in pytorch_model.bin only", "save_pretrained"])
    write_in_two(tmp_path, make_tensors(PLAIN))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    check_refused(tmp_path, ["lacks 1 of the 2 files", "model-00002-of-00002.safetensors"])
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    check_refused(tmp_path, ["model.safetensors.index.json", "weight_map"])


@pytest.mark.parametrize("size", [0, 100, -10])
def test_truncated_files_are_named(tmp_path: Path, size: int) -> None:
    write(tmp_path, make_tensors(PLAIN))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    check_refused(tmp_path, [f"{file} can't be read", "download it again"])


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = make_tensors(PLAIN)
    del tensors["lm_head.weight"]
    write(tmp_path, tensors)
    check_refused(tmp_path, ["lm_head.weight is missing", str(tmp_path), "model.safetensors"])


def test_tensors_that_only_the_index_has_are_named(tmp_path: Path) -> None:
    tensors = make_tensors(PLAIN)
    write_in_two(tmp_path, tensors)
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    first, second = sorted(set(index["weight_map"].values()))
    index["weight_map"]["lm_head.weight"] = {first: second, second: first}[index["weight_map"]["lm_head.weight"]]
    index_file.write_text(json.dumps(index))
    check_refused(tmp_path, ["lm_head.weight is missing", index["weight_map"]["lm_head.weight"], index_file.name])


@pytest.mark.parametrize(
    ("changed", "fragments"),
    [
        ({"num_heads": 8}, ["self_attn.q_proj.weight", "(16, 8)", "(32, 8)"]),
        ({"vocab_size": 14}, ["embed_tokens.weight", "(13, 8)", "(14, 8)"]),
        ({"intermediate_size": 32}, ["mlp.", "(16, 8)", "(32, 8)"]),
    ],
)
def test_wrong_shapes_are_named(tmp_path: Path, changed: dict[str, Any], fragments: list[str]) -> None:
    write(tmp_path, make_tensors(PLAIN))
    check_refused(tmp_path, [*fragments, "model.safetensors"], msgspec.structs.replace(PLAIN, **changed))


def test_quantized_tensors_are_named(tmp_path: Path) -> None:
    tensors = make_tensors(PLAIN)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    write(tmp_path, tensors)
    check_refused(tmp_path, [name, "torch.int8", "bfloat16"])


def test_shapes_that_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    write(tmp_path, make_tensors(PLAIN))
    with pytest.raises(InvalidConfig, match="tensor_parallel_size=3"):
        load_decoder_weights(WeightShare(PLAIN, torch.float32, 0, 3), tmp_path)


def test_random_weights_do_not_depend_on_the_number_of_ranks() -> None:
    whole = random_decoder_weights(WeightShare(SPEC, torch.float32), seed=3)
    ranks = [random_decoder_weights(WeightShare(SPEC, torch.float32, tp_rank, 2), seed=3) for tp_rank in range(2)]
    assert equal(torch.cat([rank.embed_VD for rank in ranks])[:13], whole.embed_VD)
    assert equal(
        torch.cat([rank.layers[1].feed_forward.down_DF for rank in ranks], dim=1), whole.layers[1].feed_forward.down_DF
    )
    assert equal(ranks[1].layers[0].mixer.qkv_OD[:8], whole.layers[0].mixer.qkv_OD[8:16])
    assert not torch.equal(whole.layers[0].mixer.o_DO, whole.layers[1].mixer.o_DO)
    assert torch.equal(whole.final_norm_D, torch.ones(8))


def test_random_weights_depend_on_the_seed() -> None:
    first, same, other = (random_decoder_weights(WeightShare(TIED, torch.bfloat16), seed) for seed in (1, 1, 2))
    assert all(equal(a, b) for a, b in zip(flat(first), flat(same), strict=True))
    assert not torch.equal(first.embed_VD, other.embed_VD)
    assert first.lm_head_VD is first.embed_VD
