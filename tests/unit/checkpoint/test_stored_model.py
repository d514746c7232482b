"""config.json against the tensors: what the tensors decide, and what is refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import configs
import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from raycore.checkpoint import stored_model
from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stages import Stage, split_layers
from raycore.checkpoint.tensor_shapes import model_tensors
from raycore.demo import DEMO_MODEL_DIR
from raycore.errors import InvalidCheckpoint
from raycore.models.mixers.latent import LatentHeads
from raycore.models.quantization import Quantization, WeightScheme
from raycore.models.spec import ModelSpec, Roots, TensorNames
from raycore.parts.drafts.checkpoint.eagle3 import Eagle3Spec
from raycore.parts.experts.models import ExpertChoice, MoeSpec, SharedExperts
from raycore.weights.loader import RankLayout, load_decoder_weights
from raycore.weights.share import WeightShare

SPEC = msgspec.structs.replace(
    configs.SPEC,
    vocab_size=13,
    hidden_size=8,
    intermediate_size=16,
    head_dim=4,
    tie_word_embeddings=False,
    max_position_embeddings=64,
)
BIASED = msgspec.structs.replace(SPEC, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm="heads")
TIED = msgspec.structs.replace(SPEC, tie_word_embeddings=True)
MOE = MoeSpec(3, 2, 6, sparse_layers=[False, True])
QWEN = msgspec.structs.replace(SPEC, architecture="Qwen3MoeForCausalLM", moe=MOE)
MIXTRAL = msgspec.structs.replace(
    SPEC, architecture="MixtralForCausalLM", moe=msgspec.structs.replace(MOE, sparse_layers=[True, True])
)
LATENT = msgspec.structs.replace(
    SPEC,
    num_kv_heads=1,
    latent=LatentHeads(rank=4, plain_dim=4, rotated_dim=4, value_dim=2, block="attention"),
    names=TensorNames(q="attention.q_proj", o="attention.dense", down="mlp.dense_4h_to_h"),
)
"""With other names of projections."""
GPT_OSS = msgspec.structs.replace(
    SPEC,
    moe=msgspec.structs.replace(
        MOE, router=ExpertChoice(has_bias=True), has_bias=True, is_interleaved=True, is_transposed=True
    ),
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "model.layers.1."

Tensors = dict[str, Any]


def stored(is_stacked: bool) -> Callable[[str], bool]:
    """Whether files have a tensor, for those that ask how experts are stored."""
    return lambda name: is_stacked and not name.endswith("_blocks")


def make(spec: ModelSpec, *, is_stacked: bool = False) -> Tensors:
    numbers = np.random.default_rng(0)
    shapes = model_tensors(spec, stored(is_stacked))
    return {name: numbers.standard_normal(shape, np.float32) for name, shape in shapes}


def write(path: Path, tensors: Tensors) -> Path:
    save_file(tensors, path / "model.safetensors")
    return path


def fit_model(spec: ModelSpec, path: Path) -> ModelSpec:
    """What config.json and the files say together."""
    return msgspec.structs.replace(stored_model.fit_model(spec, path), fitted_to=None)


def fit_eagle3(spec: ModelSpec, head: Eagle3Spec, path: Path) -> ModelSpec:
    return msgspec.structs.replace(stored_model.fit_eagle3(spec, head, path), fitted_to=None)


def message(spec: ModelSpec, path: Path) -> str:
    with pytest.raises(InvalidCheckpoint) as raised:
        fit_model(spec, path)
    return str(raised.value)


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("spec", [SPEC, BIASED, TIED, QWEN, MIXTRAL, GPT_OSS])
def test_the_expected_tensors_are_exactly_those_that_the_loader_reads(spec: ModelSpec, is_stacked: bool) -> None:
    read: dict[str, tuple[int, ...]] = {}

    def note(out: object, name: str, expected_shape: tuple[int, ...], part: object) -> None:
        read[name] = expected_shape

    share = WeightShare(spec, torch.float32, device=torch.device("meta"))
    RankLayout(share, stored(is_stacked), note).decoder()
    assert dict(model_tensors(spec, stored(is_stacked))) == read


@pytest.mark.parametrize("spec", [SPEC, BIASED, TIED, QWEN, MIXTRAL])
def test_files_that_fit_the_config_leave_the_spec_unchanged(
    tmp_path: Path, spec: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    assert fit_model(spec, write(tmp_path, make(spec))) == spec
    assert not caplog.records


def test_tensor_names_take_the_root_that_the_files_have(tmp_path: Path) -> None:
    first, second = Roots("text.model.", "text.lm_head"), Roots("model.text.", "lm_head")
    names = TensorNames(roots=first, other_roots=[second], images=r"eye\..*")
    spec = msgspec.structs.replace(BIASED, names=names)
    for roots in first, second:
        tensors = {
            f"{roots.head}.weight" if name == HEAD else f"{roots.model}{name.removeprefix('model.')}": each
            for name, each in make(BIASED).items()
        }
        write(tmp_path, tensors | {"eye.weight": np.zeros(3, np.float32)})
        fitted = fit_model(spec, tmp_path)
        assert (fitted.names.roots, [fitted.names.roots, *fitted.names.other_roots].count(second)) == (roots, 1)
        weights = load_decoder_weights(WeightShare(fitted, torch.float32), tmp_path)
        assert np.array_equal(weights.layers[1].mixer.o_DO, tensors[f"{roots.model}layers.1.self_attn.o_proj.weight"])
        assert np.array_equal(weights.lm_head_VD, tensors[f"{roots.head}.weight"])
    write(tmp_path, tensors | {"ear.weight": np.zeros(3, np.float32)})
    assert "ear.weight" in message(spec, tmp_path)


def test_a_stored_lm_head_is_used_despite_tie_word_embeddings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = make(SPEC)
    write(tmp_path, tensors)
    fitted = fit_model(TIED, tmp_path)
    assert fitted == SPEC
    assert "tie_word_embeddings=true" in caplog.text
    assert HEAD in caplog.text
    stages = [Stage.whole(fitted), split_layers(fitted, 2)[1]]
    for stage in stages:
        for rank in range(2):
            weights = load_decoder_weights(WeightShare(fitted, torch.float32, rank, 2, stage=stage), tmp_path)
            assert weights.lm_head_VD is not None
            rows = weights.lm_head_VD[: 13 - weights.vocab_start].numpy()
            assert np.array_equal(rows, tensors[HEAD][weights.vocab_start :][: len(rows)])


def test_an_lm_head_equal_to_the_embedding_takes_no_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = make(TIED)
    tensors[HEAD] = tensors[EMBEDDING].copy()
    assert fit_model(TIED, write(tmp_path, tensors)) == TIED
    tensors[HEAD][-1, -1] += 1
    assert fit_model(TIED, write(tmp_path, tensors)) == SPEC
    assert len(caplog.records) == 1


def test_experts_in_mxfp4_have_tensors_of_bytes(tmp_path: Path) -> None:
    assert GPT_OSS.moe is not None
    experts = msgspec.structs.replace(GPT_OSS.moe, intermediate_size=64)
    spec = msgspec.structs.replace(GPT_OSS, hidden_size=32, moe=experts)
    tensors = make(spec, is_stacked=True)
    for name, shape in (("gate_up_proj", (3, 128, 1)), ("down_proj", (3, 32, 2))):
        prefix = f"{LAYER}mlp.experts.{name}"
        del tensors[prefix]
        tensors[f"{prefix}_blocks"] = np.zeros((*shape, 16), np.uint8)
        tensors[f"{prefix}_scales"] = np.zeros(shape, np.uint8)
    assert fit_model(spec, write(tmp_path, tensors)) == spec
    tensors[f"{LAYER}mlp.experts.down_proj_scales"] = np.zeros((3, 32, 2), np.float32)
    assert "down_proj_scales of" in (found := message(spec, write(tmp_path, tensors)))
    assert "is stored as F32: expected U8" in found


def test_a_quantized_lm_head_is_used(tmp_path: Path) -> None:
    scheme = WeightScheme("packed", 8)
    tied = msgspec.structs.replace(TIED, quantization=Quantization("compressed-tensors", [("lm_head", scheme)]))
    tensors = make(TIED) | {
        "lm_head.weight_packed": np.zeros((13, 2), np.int32),
        "lm_head.weight_scale": np.ones((13, 1), np.float32),
        "lm_head.weight_shape": np.int64([13, 8]),
    }
    fitted = fit_model(tied, write(tmp_path, tensors))
    assert fitted == msgspec.structs.replace(tied, tie_word_embeddings=False)
    del tensors["lm_head.weight_packed"]
    assert "lm_head.weight_scale" in message(tied, write(tmp_path, tensors))


def test_a_missing_lm_head_is_refused_naming_tie_word_embeddings(tmp_path: Path) -> None:
    found = message(SPEC, write(tmp_path, make(TIED)))
    assert HEAD in found
    assert "tie_word_embeddings=true" in found


@pytest.mark.parametrize(
    ("spec", "kind", "projections"),
    [
        (SPEC, "qkv_bias", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        (SPEC, "o_bias", ["self_attn.o_proj"]),
        (SPEC, "mlp_bias", ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
        (LATENT, "qkv_bias", ["attention.kv_a_proj_with_mqa"]),
        (LATENT, "o_bias", ["attention.dense"]),
        (LATENT, "mlp_bias", ["mlp.gate_proj", "mlp.up_proj", "mlp.dense_4h_to_h"]),
    ],
)
def test_the_spec_has_the_biases_that_the_files_have(
    tmp_path: Path, spec: ModelSpec, kind: str, projections: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    biased = msgspec.structs.replace(spec, **{kind: True})
    tensors = make(biased)
    assert fit_model(spec, write(tmp_path, tensors)) == biased
    assert f"that {'/'.join(each.rpartition('.')[2] for each in projections)} have no bias" in caplog.text
    assert "computed with it" in caplog.text
    assert fit_model(biased, write(tmp_path, make(spec))) == spec
    assert "computed without it" in caplog.text
    # a bias that only some have is no model's
    del tensors[f"{LAYER}{projections[-1]}.bias"]
    assert f"{LAYER}{projections[-1]}.bias" in message(spec, write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("changes", "name", "stored", "expected"),
    [
        ({"intermediate_size": 32}, "model.layers.0.mlp.gate_proj.weight", (16, 8), (32, 8)),
        ({"num_heads": 8}, "model.layers.0.self_attn.q_proj.weight", (16, 8), (32, 8)),
        ({"num_kv_heads": 4}, "model.layers.0.self_attn.k_proj.weight", (8, 8), (16, 8)),
        ({"vocab_size": 20}, EMBEDDING, (13, 8), (20, 8)),
        ({"hidden_size": 16}, EMBEDDING, (13, 8), (13, 16)),
    ],
)
def test_tensor_sizes_that_differ_from_the_config_are_refused(
    tmp_path: Path, changes: dict[str, Any], name: str, stored: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    found = message(msgspec.structs.replace(SPEC, **changes), write(tmp_path, make(SPEC)))
    for fragment in (name, str(stored), str(expected), str(tmp_path / "model.safetensors")):
        assert fragment in found


@pytest.mark.parametrize(("others", "layers"), [(3, "have 2 layers"), (1, "have 2 layers")])
def test_a_number_of_layers_that_differs_from_the_config_is_refused(tmp_path: Path, others: int, layers: str) -> None:
    spec = msgspec.structs.replace(SPEC, num_layers=others, layer_windows=[None] * others)
    found = message(spec, write(tmp_path, make(SPEC)))
    assert layers in found
    assert f"num_hidden_layers={others}" in found
    assert f"model.layers.{min(others, 2)}." in found


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}self_attn.q_norm.weight",
        f"{LAYER}input_layernorm.bias",
        f"{LAYER}mlp.experts.0.up_proj.weight",
        "score.weight",
        "lm_head.bias",
    ],
)
def test_tensors_that_nobody_reads_are_refused(tmp_path: Path, name: str) -> None:
    found = message(SPEC, write(tmp_path, make(SPEC) | {name: np.ones((5, 3), np.float32)}))
    for fragment in (name, "(5, 3)", str(tmp_path / "model.safetensors")):
        assert fragment in found


def test_norms_that_are_missing_are_refused(tmp_path: Path) -> None:
    with_norms = msgspec.structs.replace(SPEC, qk_norm="heads")
    assert "model.layers.0.self_attn.q_norm.weight" in message(with_norms, write(tmp_path, make(SPEC)))


def test_tensors_under_another_name_are_named_beside_those_that_are_missing(tmp_path: Path) -> None:
    names = msgspec.structs.replace(SPEC.names, before_feed_forward="pre_feedforward_layernorm")
    tensors = make(SPEC) | {f"{LAYER}self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    found = message(msgspec.structs.replace(SPEC, names=names), write(tmp_path, tensors))
    lacking, unused = found.split("the model wouldn't use")
    assert f"{LAYER}pre_feedforward_layernorm.weight" in lacking
    assert f"{LAYER}post_attention_layernorm.weight" in unused
    assert "inv_freq" not in unused, "it would say nothing about the model"


def test_known_tensors_without_use_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [
        "model.rotary_emb.inv_freq",
        f"{LAYER}self_attn.rotary_emb.inv_freq",
        f"{LAYER}self_attn.k_scale",
        f"{LAYER}attention.masked_bias",
        f"{LAYER}attn.bias",
        f"{LAYER}self_attn.k_proj.output_scale",
        "mtp.layers.0.mlp.up_proj.weight",
        "model.mtp_block.0.mlp.up_proj.weight",
        "model.mtp_emb_norm.0.weight",
        "lm_head.bias",  # some tools for quantization write zeros
    ]
    tensors = make(SPEC) | dict.fromkeys(names, np.zeros(2, np.float32))
    with caplog.at_level(logging.INFO):
        assert fit_model(SPEC, write(tmp_path, tensors)) == SPEC
    for name in names:
        assert name in caplog.text


def test_layers_that_predict_further_tokens_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = msgspec.structs.replace(SPEC, num_predictors=1)
    name = f"model.layers.{SPEC.num_layers}.eh_proj.weight"
    with caplog.at_level(logging.INFO):
        assert fit_model(spec, write(tmp_path, make(SPEC) | {name: np.zeros(2, np.float32)})) == spec
    assert name in caplog.text
    assert f"{SPEC.num_layers + 1} layers" in message(SPEC, tmp_path)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_routers_and_shared_experts_have_tensors(tmp_path: Path, is_stacked: bool) -> None:
    router, shared = ExpertChoice("sigmoid", has_correction=True), SharedExperts(4, has_gate=True)
    spec = msgspec.structs.replace(QWEN, moe=msgspec.structs.replace(MOE, router=router, shared=shared))
    tensors = make(spec, is_stacked=is_stacked)
    block = f"{LAYER}mlp."
    assert tensors[f"{block}gate.e_score_correction_bias"].shape == (3,)
    assert tensors[f"{block}shared_experts.up_proj.weight"].shape == (4, 8)
    assert tensors[f"{block}shared_experts.down_proj.weight"].shape == (8, 4)
    assert tensors[f"{block}shared_expert_gate.weight"].shape == (1, 8)
    assert fit_model(spec, write(tmp_path, tensors)) == spec


def test_tensors_of_unsupported_dtypes_are_refused(tmp_path: Path) -> None:
    tensors = make(SPEC)
    tensors[EMBEDDING] = tensors[EMBEDDING].astype(np.int8)
    found = message(SPEC, write(tmp_path, tensors))
    assert f"tensor {EMBEDDING}" in found
    assert "I8: expected F32 or BF16 or F16" in found


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_the_tensors_of_eagle3_heads_are_compared_with_their_config(tmp_path: Path, prefix: str) -> None:
    spec = msgspec.structs.replace(SPEC, num_layers=1, layer_windows=[None])
    head = Eagle3Spec(5, 8, [0, 1], norm_before_residual=False)
    own = {name.replace("model.layers.0.", prefix): tensor for name, tensor in make(spec).items() if "layers" in name}
    for each in "qkv":
        name = f"{prefix}self_attn.{each}_proj.weight"
        own[name] = np.concatenate([own[name]] * 2, axis=1)
    tensors = own | {
        "fc.weight": np.zeros((8, 16), np.float32),
        f"{prefix}hidden_norm.weight": np.ones(8, np.float32),
        "norm.weight": np.ones(8, np.float32),
        HEAD: np.zeros((5, 8), np.float32),
        "d2t": np.zeros(5, np.int64),
        "t2d": np.zeros(13, np.bool_),
    }
    assert fit_eagle3(spec, head, write(tmp_path, tensors)) == spec
    bias = {f"{prefix}self_attn.o_proj.bias": np.zeros(8, np.float32)}
    assert fit_eagle3(spec, head, write(tmp_path, tensors | bias)).o_bias
    for changed, fragment in (({"fc.weight": np.zeros((8, 24), np.float32)}, r"\(8, 24\)"), ({"x": own[name]}, "x")):
        with pytest.raises(InvalidCheckpoint, match=fragment):
            fit_eagle3(spec, head, write(tmp_path, tensors | changed))


def test_the_demo_models_tensors_are_all_read() -> None:
    spec = load_model_spec(DEMO_MODEL_DIR)
    assert fit_model(spec, DEMO_MODEL_DIR) == spec


def test_files_that_were_compared_once_are_not_compared_again(tmp_path: Path, monkeypatch) -> None:
    tensors = make(TIED)
    tensors[HEAD] = tensors[EMBEDDING].copy()
    for part in ("driver", "node"):
        (tmp_path / part).mkdir()
    spec = stored_model.fit_model(TIED, write(tmp_path / "driver", tensors))
    for compare in ("_check", "_same_bytes", "_with_biases"):
        monkeypatch.setattr(stored_model, compare, None)
    # the order of the tensors and their numbers may be others
    node = write(tmp_path / "node", {name: tensors[name] + 1 for name in reversed(tensors)})
    assert stored_model.fit_model(spec, node) == spec


def test_files_that_changed_since_their_comparison_are_compared_again(tmp_path: Path) -> None:
    tensors = make(SPEC)
    spec = stored_model.fit_model(SPEC, write(tmp_path, tensors))
    biased = msgspec.structs.replace(SPEC, o_bias=True)
    with pytest.raises(InvalidCheckpoint, match=r"on this node .*: o_bias differs. Copy the same checkpoint"):
        stored_model.fit_model(spec, write(tmp_path, make(biased)))
    assert LAYER in message(spec, write(tmp_path, {name: each for name, each in tensors.items() if LAYER not in name}))
    assert "(13, 4)" in message(spec, write(tmp_path, tensors | {EMBEDDING: tensors[EMBEDDING][:, :4].copy()}))
    # other data types are no other model
    halves = {name: each.astype(np.float16) for name, each in tensors.items()}
    assert fit_model(spec, write(tmp_path, halves)) == SPEC
    (tmp_path / "model.safetensors").unlink()
    assert "no weights at all" in message(spec, tmp_path)
