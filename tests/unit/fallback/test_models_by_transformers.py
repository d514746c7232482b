"""Models that transformers' code computes: their descriptions, what is refused and why, and the test at start."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from families import SIZES, make_checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP

from raycore.checkpoint.model_spec import load_model_spec
from raycore.config import resolve
from raycore.config.checks import warn_of_transformers
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.fallback import trace as tracing
from raycore.fallback.decoder import TransformersDecoder
from raycore.fallback.networks import load_network
from raycore.kernels import Backend
from raycore.layers.operations import Operations
from raycore.models.registry import FAMILIES
from raycore.models.spec import LinearShape, ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.adapters.layers import Adapters
from raycore.parts.adapters.weights import LoraLinear, LoraPart, LoraWeights
from raycore.worker.compute_backend import ComputeBackend

CPU = torch.device("cpu")
SMALL = SIZES | {"num_key_value_heads": 2}


def written(path: Path, config: str, **options: Any) -> Path:
    """Write a config.json, without weights."""
    made = getattr(transformers, config)(**SMALL | options)
    network = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").__class__.__name__
    made.architectures = [network]
    made.save_pretrained(path)
    return path


def description(path: Path, max_length: int | None = None) -> ModelSpec:
    return load_model_spec(path, "transformers", max_length)


def test_a_description_has_what_the_network_asks_of_attention(tmp_path: Path):
    spec = description(written(tmp_path, "GPTNeoXConfig"))
    assert (spec.architecture, spec.implementation) == ("GPTNeoXForCausalLM", "transformers")
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 4, 16)
    assert (spec.attention_scale, spec.vocab_size, spec.hidden_size) == (0.25, SIZES["vocab_size"], 64)
    assert spec.rotations == [None, None]
    assert spec.tensor_parallel_sizes == [1, 2, 4]


def test_caps_sinks_and_windows_are_found(tmp_path: Path):
    capped = description(written(tmp_path / "capped", "Gemma2Config", sliding_window=9, attn_logit_softcapping=7.0))
    assert (capped.attention_softcap, capped.layer_windows, capped.sinks) == (7.0, [9, None], False)
    sinks = description(
        written(tmp_path / "sinks", "GptOssConfig", sliding_window=5, num_experts_per_tok=2, num_local_experts=2)
    )
    assert (sinks.sinks, sinks.layer_windows) == (True, [5, None])


def test_values_that_are_shorter_than_keys_count_as_long(tmp_path: Path):
    path = make_checkpoint("deepseek_v3_heads", tmp_path)
    assert description(path).head_dim == 24


def test_a_window_longer_than_all_sequences_is_none(tmp_path: Path):
    assert description(written(tmp_path / "short", "MistralConfig", sliding_window=100)).layer_windows == [100, 100]
    assert description(written(tmp_path / "long", "MistralConfig", sliding_window=500)).layer_windows == [None, None]


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        ("MambaConfig", {"state_size": 4}, "keep a state of their own"),
        ("BloomConfig", {"n_layer": 2, "n_head": 4}, "doesn't go through transformers' attention interface"),
        ("BertConfig", {}, "neither causal nor a sliding window"),
        ("GPT2Config", {"hidden_size": 60}, "odd number of elements"),
        (
            "Llama4TextConfig",
            {"attention_chunk_size": 16, "num_local_experts": 2},
            "mask of attention isn't a function of positions",
        ),
    ],
)
def test_what_attention_cannot_do_is_refused_with_the_reason(tmp_path, config, options, reason):
    with pytest.raises(InvalidCheckpoint, match=f"can't be computed by transformers' code in raycore: .*{reason}"):
        description(written(tmp_path, config, **options))


def test_rotations_that_follow_the_longest_sequence_of_a_step_are_refused(tmp_path: Path):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    path = written(tmp_path, "Phi3Config", rope_parameters=rope, original_max_position_embeddings=64)
    with pytest.raises(InvalidCheckpoint, match=r"longrope.*set max_model_len to 64 at most"):
        description(path)
    assert description(path, max_length=64).num_layers == 2


def test_auto_takes_a_family_where_there_is_one(tmp_path: Path):
    known = make_checkpoint("llama3", tmp_path)
    assert load_model_spec(known, "auto").implementation == "raycore"
    assert load_model_spec(known, "transformers").implementation == "transformers"
    other = written(tmp_path / "other", "OPTConfig")
    assert load_model_spec(other, "auto").implementation == "transformers"
    with pytest.raises(InvalidCheckpoint, match=r"OPTForCausalLM.*expected one of .*LlamaForCausalLM"):
        load_model_spec(other, "raycore")


def test_prompts_are_not_divided(tmp_path: Path):
    path = written(tmp_path, "GPTNeoXConfig")
    with pytest.raises(InvalidConfig, match="prefill_context_parallel_size=2 can't be used with GPTNeoXForCausalLM"):
        resolve(path, model_impl="transformers", prefill_context_parallel_size=2)


@pytest.mark.parametrize(
    ("config", "model_impl", "num_warnings"),
    [
        ("OPTConfig", None, 1),
        ("OPTConfig", "auto", 1),
        ("OPTConfig", "transformers", 0),
        ("LlamaConfig", None, 0),
    ],
)
def test_a_start_warns_of_code_that_was_not_asked_for(config, model_impl, num_warnings, tmp_path: Path, caplog):
    path = written(tmp_path, config)
    with caplog.at_level(logging.WARNING, "raycore"):
        warn_of_transformers(load_model_spec(path, model_impl or "auto"), model_impl)
    assert len(caplog.messages) == num_warnings
    for text in caplog.messages:
        assert text.startswith("raycore has no family for OPTForCausalLM: transformers' code computes its layers")
        assert "\n" not in text


def test_without_transformers_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path, "OPTConfig")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InvalidCheckpoint) as error:
        load_model_spec(path, "auto")
    for part in ("OPTForCausalLM", 'pip install "raycore[transformers]"', *FAMILIES):
        assert part in str(error.value)


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path):
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    )
    (tmp_path / "own.py").write_text("raise AssertionError('it ran')")
    with pytest.raises(InvalidCheckpoint, match=r"OwnForCausalLM.*refuses its config.json"):
        load_model_spec(tmp_path, "auto")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("enable_expert_parallel", True),
        ("batch_invariant", True),
        ("quantization", "int8"),
        ("load_format", "sharded_state"),
    ],
)
def test_options_that_need_a_family_are_refused_by_name(tmp_path: Path, option: str, value: object):
    path = make_checkpoint("gpt_neox", tmp_path)
    with pytest.raises(InvalidConfig, match=f"^{option}={value!r} can't be used with GPTNeoXForCausalLM"):
        resolve(path, model_impl="transformers", **{option: value})


def test_a_number_of_ranks_that_cannot_divide_the_model_is_refused_with_those_that_can(tmp_path: Path):
    path = make_checkpoint("gpt_neox", tmp_path)
    with pytest.raises(InvalidConfig, match=r"tensor_parallel_size=3 can't divide .*: choose one of \[1, 2, 4\]"):
        resolve(path, model_impl="transformers", tensor_parallel_size=3)
    with pytest.raises(InvalidConfig, match=r"tensor_parallel_size=2 can't divide .*no plan"):
        resolve(make_checkpoint("gpt2", tmp_path), tensor_parallel_size=2)


def make_decoder(
    path: Path, dtype: torch.dtype = torch.float32, adapters: Adapters | None = None, **changes: Any
) -> TransformersDecoder:
    """`changes`: fields of the description."""
    network, operations = load_network(path, dtype, None), Operations(CPU)
    spec = msgspec.structs.replace(description(path), **changes)
    return TransformersDecoder(spec, network, TensorParallel(), operations, adapters=adapters)


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_test_at_start_passes_where_all_is_well(tmp_path: Path, name: str, dtype: torch.dtype):
    decoder = make_decoder(make_checkpoint(name, tmp_path), dtype)
    assert decoder.num_key_value_numbers == 2 * 2 * 64 // (2 if name == "llama3" else 1)


def test_a_network_that_shifts_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = make_checkpoint("llama3", tmp_path)
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x) + 0.3 * x.roll(1, dims=1))
    with pytest.raises(InvalidCheckpoint, match="for several sequences in one row of tokens"):
        make_decoder(path)


def test_a_description_has_the_linear_layers_that_adapters_may_change(tmp_path: Path):
    """Not the head, and with experts neither these nor what chooses them."""
    linears = description(make_checkpoint("gpt2", tmp_path)).linears
    of_layer = {name.removeprefix("transformer.h.1."): shape for name, shape in linears.items() if ".1." in name}
    assert of_layer == {
        "attn.c_attn": LinearShape(192, 64),
        "attn.c_proj": LinearShape(64, 64),
        "mlp.c_fc": LinearShape(256, 64),
        "mlp.c_proj": LinearShape(64, 256),
    }
    assert len(linears) == 8
    with_experts = description(make_checkpoint("gpt_oss", tmp_path)).linears
    assert {name.split(".", 3)[3] for name in with_experts} == {f"self_attn.{each}_proj" for each in "qkvo"}
    divided = description(make_checkpoint("llama3", tmp_path)).linears
    assert divided["model.layers.0.self_attn.q_proj"].divided == "outputs"
    assert divided["model.layers.0.mlp.down_proj"].divided == "inputs"


def test_a_linear_layer_that_is_not_called_as_described_is_refused_if_there_are_adapters(tmp_path: Path):
    path = make_checkpoint("gpt_neox", tmp_path)
    name = "gpt_neox.layers.0.attention.dense"
    for shape in (LinearShape(64, 32), LinearShape(64, 64)):
        with pytest.raises(InvalidCheckpoint, match=f"its {name} isn't called like without"):
            make_decoder(path, adapters=Adapters(CPU, 1), linears={name: shape})
    make_decoder(path, linears={})


def test_adapters_that_are_held_change_nothing_in_the_test_at_start(tmp_path: Path):
    path = make_checkpoint("gpt_neox", tmp_path)
    adapters = Adapters(CPU, 1)
    linear = LoraLinear(torch.ones(1, 64), (LoraPart(0, 1, 0, torch.arange(64.0)[None]),))
    adapters.put(0, adapters.arrange(LoraWeights([], {"gpt_neox.layers.0.attention.dense": linear})))
    adapters.rows.begin_step(np.zeros(3, np.int64), np.array([2]))
    make_decoder(path, adapters=adapters)


def test_a_window_that_the_trace_gets_wrong_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = make_checkpoint("llama3", tmp_path)
    right = description(path)
    monkeypatch.setattr(tracing._Masks, "window_of", lambda self, mask: 2)
    network = load_network(path, torch.float32, None)
    with pytest.raises(InvalidCheckpoint, match="other attention"):
        TransformersDecoder(right, network, TensorParallel(), Operations(torch.device("cpu")))
    with pytest.raises(InvalidCheckpoint, match="for several sequences"):
        make_decoder(path)


def test_a_checkpoint_without_a_tensor_is_refused_by_name(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    path = make_checkpoint("gpt_neox", tmp_path)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: each for name, each in tensors.items() if "dense_4h_to_h.weight" not in name}, file)
    with pytest.raises(InvalidCheckpoint, match=r"lacks .*dense_4h_to_h\.weight"):
        load_network(path, torch.float32, None)


def test_random_weights_follow_from_the_seed(tmp_path: Path):
    path = written(tmp_path, "GPTNeoXConfig")
    one, same, other = (load_network(path, torch.float32, seed).gpt_neox.embed_in.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("by", ["torch", "native"])
def test_the_status_names_the_layers_that_transformers_computes(tmp_path: Path, by: Backend):
    backend = ComputeBackend(by, by, torch.device("cpu"), batch_invariant=False, cache_dtype=torch.float32)
    assert backend.parts_by_torch(description(written(tmp_path, "GPTNeoXConfig"))) == ["layers of transformers' code"]
