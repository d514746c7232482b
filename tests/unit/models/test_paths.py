"""What config.json of families means whose hidden states take another path through a layer than Llama's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_specs import spec_of

from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.models.rotation import Rotation
from raycore.parts.experts.models import ExpertChoice, SharedExperts

MOE = "Cohere2MoeForCausalLM"


def test_layers_of_cohere_have_one_norm(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "CohereForCausalLM", num_hidden_layers=2, layer_norm_eps=1e-3, use_qk_norm=True)
    assert (spec.norm, spec.is_parallel, spec.rms_norm_eps, spec.qk_norm) == ("layer", True, 1e-3, "own_heads")
    assert (spec.norms(0).given, spec.norm_tensors("a")) == (["input_layernorm"], ["a.weight"])
    assert (spec.logits_multiplier, spec.rotations[0]) == (0.0625, Rotation(500000.0, is_adjacent=True))


def test_only_layers_of_cohere_2_with_windows_rotate(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "Cohere2ForCausalLM", num_hidden_layers=4)
    rotation = Rotation(10000.0, is_adjacent=True)
    assert spec.layer_windows == [4096, 4096, 4096, None]
    assert spec.rotations == [rotation, rotation, rotation, None]
    assert set(spec_of(tmp_path, "Cohere2ForCausalLM", sliding_window=None).rotations) == {None}


def test_layers_of_cohere_2_with_experts_follow_two_patterns(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 5, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 64}
    spec = spec_of(tmp_path, MOE, **sizes, intermediate_size=32, num_shared_experts=3, rms_norm_eps=1e-4)
    rotation = Rotation(10000.0, is_adjacent=True)
    assert spec.layer_windows == [None, 4096, 4096, 4096, None]
    assert spec.rotations == [rotation] * 4 + [None]
    assert (spec.norm, spec.rms_norm_eps, spec.intermediate_size) == ("rms", 1e-4, 64)
    moe = spec.moe
    assert moe is not None
    assert (moe.sparse_layers, moe.intermediate_size, moe.multiplier) == ([False] + [True] * 4, 32, 0.5)
    assert moe.shared == SharedExperts(96, size_key="intermediate_size times num_shared_experts")
    assert moe.router == ExpertChoice("softmax_of_chosen")
    plain = spec_of(tmp_path, MOE, **sizes, prefix_dense_sliding_window_pattern=2, expert_selection_fn="sigmoid")
    assert plain.layer_windows == [4096, 4096, 4096, 4096, None]
    assert plain.moe is not None
    assert (plain.norm, plain.rms_norm_eps, plain.moe.shared, plain.moe.multiplier) == ("layer", 1e-5, None, 1.0)
    assert plain.moe.router == ExpertChoice("sigmoid", is_normalized=True)
    assert spec_of(tmp_path, MOE, num_hidden_layers=2, mlp_layer_types=["dense"] * 2).moe is None


def test_norms_of_heads_of_stablelm_are_tensors_of_their_own(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    spec = spec_of(tmp_path, "StableLmForCausalLM", **sizes, qk_layernorm=True)
    (mixer,) = spec.mixers
    norms = {name for name in mixer.tensors(spec) if "layernorm" in name}
    queries = {f"self_attn.q_layernorm.norms.{head}.weight" for head in range(4)}
    assert norms == queries | {f"self_attn.k_layernorm.norms.{head}.weight" for head in range(2)}
    ranks = [mixer.vectors(spec, tp_rank, 4) for tp_rank in range(4)]
    assert [[part.name[-8] for each in vectors for part in each.parts] for vectors in ranks] == [
        ["0", "0"],
        ["1", "0"],
        ["2", "1"],
        ["3", "1"],
    ]
    assert (spec.rotations[0], spec.norms(0).given) == (
        Rotation(10000.0, fraction=0.25),
        ["input_layernorm", "post_attention_layernorm"],
    )
    parallel = spec_of(tmp_path, "StableLmForCausalLM", use_parallel_residual=True)
    assert (parallel.is_parallel, parallel.norms(0).given) == (True, ["input_layernorm"])


def test_starcoder_2_has_biases_unless_it_says_otherwise(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "Starcoder2ForCausalLM", sliding_window=8, norm_epsilon=1e-3)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.rms_norm_eps) == (True, True, True, 1e-3)
    assert (spec.is_gated, spec.gate, set(spec.layer_windows)) == (False, "gelu_tanh", {8})
    assert spec.norm_tensors("a") == ["a.weight", "a.bias"]
    assert not spec_of(tmp_path, "Starcoder2ForCausalLM", use_bias=False).mlp_bias


def test_apertus_may_lack_the_constants_of_its_activation(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "ApertusForCausalLM", num_hidden_layers=1)
    (part,) = spec.feed_forwards
    with_constants, without = (part.stored(spec, lambda name, has=has: has) for has in (True, False))
    activation = {"mlp.act_fn.alpha_p": (1,), "mlp.act_fn.alpha_n": (1,)}
    assert {name: shape for name, shape in without.tensors(spec).items() if "act_fn" in name} == activation
    constants = {"mlp.act_fn.beta": (), "mlp.act_fn.eps": ()}
    assert with_constants.tensors(spec).items() >= (activation | constants).items()
    scaling = spec.rotations[0] and spec.rotations[0].scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor, spec.max_length) == ("llama3", 8.0, 65536)


def test_gelu_of_gemma_is_its_approximation(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "GemmaForCausalLM", hidden_act="gelu", hidden_size=64)
    assert (spec.gate, spec.norm_offset, spec.embedding_multiplier) == ("gelu_tanh", 1.0, 8.0)
    assert spec_of(tmp_path, "GemmaForCausalLM", hidden_act="silu").gate == "silu"


def test_logits_of_hyperclova_x_are_multiplied(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "HyperCLOVAXForCausalLM", logits_scaling=0.25)
    assert (spec.logits_multiplier, spec.attention_scale) == (0.25, None)
    assert (spec.names.after_attention, spec.names.after_feed_forward) == ("post_norm1", "post_norm2")
    plain = spec_of(tmp_path, "HyperCLOVAXForCausalLM", use_post_norm=False, attention_multiplier=0.5)
    assert (plain.names.after_attention, plain.attention_scale) == (None, 0.5)


def test_jais_2_has_biases_unless_it_says_otherwise(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "Jais2ForCausalLM", mlp_bias=False, layer_norm_eps=1e-3)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.rms_norm_eps) == (True, True, False, 1e-3)
    assert (spec.norm, spec.is_gated, spec.gate) == ("biased_layer", False, "relu2")


def test_windows_of_ministral_and_cwm_follow_types(tmp_path: Path) -> None:
    types = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    for name in ("MinistralForCausalLM", "CwmForCausalLM"):
        assert spec_of(tmp_path, name, **types).layer_windows == [8, None]
    assert spec_of(tmp_path, "MinistralForCausalLM", num_hidden_layers=2).layer_windows == [4096] * 2
    cwm = spec_of(tmp_path, "CwmForCausalLM", num_hidden_layers=5)
    assert (cwm.layer_windows, cwm.eos_token_ids) == ([None, 8192, 8192, 8192, None], [128001, 128008, 128009])
    assert cwm.rotations[0] is not None
    assert cwm.rotations[0].scaling is not None
    assert cwm.rotations[0].scaling.factor == 16.0


def test_half_of_each_head_of_nemotron_is_rotated(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "NemotronForCausalLM", norm_eps=1e-3)
    assert (spec.norm, spec.norm_offset, spec.rms_norm_eps) == ("biased_layer", 1.0, 1e-3)
    assert (spec.rotations[0], spec.is_gated, spec.gate) == (Rotation(10000.0, fraction=0.5), False, "relu2")


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("Cohere2ForCausalLM", {"use_parallel_block": False}, "use_parallel_block=False: expected true"),
        (MOE, {"expert_selection_fn": "tanh"}, "expert_selection_fn='tanh': expected softmax or sigmoid"),
        (
            MOE,
            {"shared_expert_combination_strategy": "max"},
            "shared_expert_combination_strategy='max': expected average",
        ),
        (
            MOE,
            {"num_hidden_layers": 2, "mlp_layer_types": ["dense"]},
            "mlp_layer_types=.*: expected a list of 2 entries",
        ),
        ("ApertusForCausalLM", {"hidden_act": "silu"}, "hidden_act='silu': expected xielu"),
        ("ApertusForCausalLM", {"post_norm": True}, "post_norm=True: expected false"),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True: expected false"),
        (
            "OlmoForCausalLM",
            {"clip_qkv": 8.0},
            "clip_qkv=8.0: expected null: model_impl='transformers' computes others",
        ),
        ("HeliumForCausalLM", {"mlp_bias": True}, "mlp_bias=True: expected false"),
    ],
)
def test_what_these_families_lack_is_refused_by_name(
    tmp_path: Path, name: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, name, **config)


def test_ranks_divide_dense_layers_of_cohere_2_beside_experts(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 99}
    with pytest.raises(InvalidConfig, match="intermediate_size=99"):
        spec_of(tmp_path, MOE, **sizes, intermediate_size=64).check_tensor_parallel(2)
