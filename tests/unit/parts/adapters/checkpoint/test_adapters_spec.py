"""Adapters that PEFT writes are read; those that don't fit, or are damaged, are refused by one error, and soon."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from configs import SPEC
from peft_adapters import adapted_modules, make_adapter, save_adapter
from safetensors.torch import load_file, save_file

from raycore.errors import InvalidAdapter
from raycore.models.mixers.delta import DeltaSpec
from raycore.models.mixers.kda import KdaSpec
from raycore.models.mixers.short_conv import ShortConvSpec
from raycore.models.spec import ModelSpec, Roots, TensorNames
from raycore.parts.adapters.checkpoint.spec import LoraSpec
from raycore.parts.experts.models import MoeSpec

PREFIX = "base_model.model.model.layers."
Q_A = f"{PREFIX}0.self_attn.q_proj.lora_A.weight"
UP_B = f"{PREFIX}1.mlp.up_proj.lora_B.weight"


def read(path: Path, model: ModelSpec = SPEC, max_lora_rank: int = 16) -> LoraSpec:
    return LoraSpec.read(path, model, max_lora_rank)


def refused(path: Path, model: ModelSpec = SPEC, max_lora_rank: int = 16) -> str:
    with pytest.raises(InvalidAdapter) as error:
        read(path, model, max_lora_rank)
    assert len(str(error.value)) < 3000
    return str(error.value)


def change_config(path: Path, **changes: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, path / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter")
    save_adapter(path)
    return path


@pytest.fixture
def adapter(original: Path, tmp_path: Path) -> Path:
    """A copy of an adapter of all projections of both layers, with r=4."""
    return shutil.copytree(original, tmp_path / "adapter")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": r".*\.(o|down)_proj"},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
        {"r": 3, "lora_alpha": 5, "use_rslora": True},
        {"rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\.(up|gate)_proj": 2}, "alpha_pattern": {".*": 0.5}},
        {
            "rank_pattern": {"^model.layers.0.self_attn.k_proj": 5, "k_proj": 6, "self_attn.q.proj": 7},
            "alpha_pattern": {"model.layers.1.mlp.down_proj": 3, "proj": 99, "1.self_attn.o_proj": 4},
            "use_rslora": True,
        },
        {"lora_alpha": -8, "bias": "none", "task_type": "CAUSAL_LM", "lora_dropout": 0.1},
        {"init_lora_weights": "gaussian"},
    ],
    ids=lambda options: ",".join(options) or "defaults",
)
def test_modules_have_the_ranks_and_scaling_of_peft(tmp_path: Path, options: dict[str, Any]) -> None:
    modules = adapted_modules(save_adapter(tmp_path, **options))
    found = read(tmp_path)
    assert {key: (module.rank, module.scaling) for key, module in found.modules.items()} == {
        key: (module.r["default"], module.scaling["default"]) for key, module in modules.items()
    }
    assert found.max_rank == max(module.r["default"] for module in modules.values())
    assert found.num_parameters == sum(
        matrix["default"].weight.numel() for module in modules.values() for matrix in (module.lora_A, module.lora_B)
    )


def test_tensor_names_may_contain_the_adapters_name(adapter: Path) -> None:
    state = make_adapter().state_dict()
    tensors = {name: tensor for name, tensor in state.items() if "lora_" in name}
    assert all(".default." in name for name in tensors)
    expected = read(adapter)
    save_file(tensors, adapter / "adapter_model.safetensors")
    found = read(adapter)
    assert found.modules[0, "self_attn.q_proj"].a_name == f"{PREFIX}0.self_attn.q_proj.lora_A.default.weight"
    assert {key: module[:2] for key, module in found.modules.items()} == {
        key: module[:2] for key, module in expected.modules.items()
    }


def test_tensor_names_may_begin_with_any_root_of_the_models_files(adapter: Path) -> None:
    roots = Roots("text.model.", "lm_head"), Roots("model.text.", "lm_head")
    model = msgspec.structs.replace(SPEC, names=TensorNames(roots=roots[0], other_roots=[roots[1]]))
    change_config(adapter, rank_pattern={"model.text.layers.0.self_attn.q_proj": 2})
    assert "only lora_A and lora_B" in refused(adapter, model)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for root in roots:
        inner = f"base_model.model.{root.model}layers."
        renamed = {name.replace(PREFIX, inner): tensor for name, tensor in tensors.items()}
        save_file(renamed, adapter / "adapter_model.safetensors")
        if root == roots[0]:
            assert read(adapter, model).modules[0, "self_attn.q_proj"].rank == 4
        else:
            assert "because of r=2" in refused(adapter, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lora_matrices_may_be_stored_in_16_bits(adapter: Path, dtype: torch.dtype) -> None:
    change_tensors(adapter, lambda all_: all_.update({name: tensor.to(dtype) for name, tensor in all_.items()}))
    assert read(adapter).max_rank == 4


def test_layers_with_experts_may_have_adapters_of_attention_only(tmp_path: Path) -> None:
    model = msgspec.structs.replace(SPEC, moe=MoeSpec(4, 2, 8, [False, True]))
    save_adapter(tmp_path / "attention", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    assert len(read(tmp_path / "attention", model).modules) == 8
    save_adapter(tmp_path / "dense", target_modules=["up_proj", "o_proj"], layers_to_transform=[0])
    assert set(read(tmp_path / "dense", model).modules) == {(0, "mlp.up_proj"), (0, "self_attn.o_proj")}
    save_adapter(tmp_path / "sparse", target_modules=["up_proj", "o_proj"], layers_to_transform=[1])
    assert "1.mlp.up_proj.lora_A.weight': this layer of the model has experts" in refused(tmp_path / "sparse", model)


@pytest.mark.parametrize(
    ("options", "message", "of_tensors"),
    [
        ({"use_dora": True}, "use_dora=True: expected no value, because DoRA", "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']: expected no value", "of the head"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices=[1, 2]: expected no", "trained embeddings"),
        ({"lora_bias": True}, "lora_bias=True: expected no value", "trained biases"),
        ({"bias": "all"}, "bias='all': expected 'none'", None),
        ({"target_modules": ["q_proj", "embed_tokens"]}, None, "embeddings"),
        ({"target_modules": ["q_proj", "lm_head"]}, None, "of the head"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': expected an adapter for the model's own", None),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora': expected an adapter for the model's own", None),
        ({"r": 17}, "r=17 for model.layers.0.self_attn.q_proj is more than max_lora_rank=16: raise max_lora", None),
        ({"rank_pattern": {"q_proj": 17}}, "r=17 for model.layers.0.self_attn.q_proj is more than max_lora", None),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_peft_settings_that_raycore_does_not_support_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str | None, of_tensors: str | None
) -> None:
    save_adapter(tmp_path, **({"target_modules": ["q_proj"]} | options))
    if message:
        found = refused(tmp_path)
        assert message in found
        assert str(tmp_path / "adapter_config.json") in found
    if of_tensors:  # are refused by themselves, too
        change_config(tmp_path, use_dora=False, modules_to_save=None, trainable_token_indices=None, lora_bias=False)
        found = refused(tmp_path)
        assert of_tensors in found
        assert f"{tmp_path / 'adapter_model.safetensors'}: tensor 'base_model" in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA': expected 'LORA'"),
        ({"peft_type": None}, "peft_type is missing: expected 'LORA'"),
        ({"peft_type": ["LORA"]}, "peft_type=['LORA']: expected 'LORA'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True: expected no value"),
        ({"use_dora": "no"}, "use_dora='no': expected no value"),
        ({"use_qalora": True}, "use_qalora=True: expected no value"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora={'nblocks': 2}: expected no value"),
        ({"arrow_config": {"top_k": 1}}, "arrow_config={'top_k': 1}: expected no value"),
        ({"kasa_config": {"beta": 1}}, "kasa_config={'beta': 1}: expected no value"),
        ({"monteclora_config": {"a": 1}}, "monteclora_config={'a': 1}: expected no value"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens=[5]: expected no value"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=[[0, 2]]: expected no value"),
        ({"target_parameters": ["experts.up"]}, "target_parameters=['experts.up']: expected no value"),
        ({"init_lora_weights": "PiSSA_niter_4"}, "init_lora_weights='PiSSA_niter_4': expected"),
        ({"bias": "lora_only"}, "bias='lora_only': expected 'none'"),
        ({"bias": True}, "bias=True: expected 'none'"),
        ({"use_rslora": 1}, "use_rslora=1: expected true or false"),
        ({"r": None}, "r is missing: expected an integer, at least 1"),
        ({"r": 0}, "r=0: expected an integer, at least 1"),
        ({"r": -4}, "r=-4: expected an integer"),
        ({"r": 4.0}, "r=4.0: expected an integer"),
        ({"r": True}, "r=True: expected an integer"),
        ({"r": "4"}, "r='4': expected an integer"),
        ({"r": 8}, "down_proj.lora_A.weight': shape (4, 64): expected (8, 64), because of r=8"),
        ({"r": 10**400}, "is more than max_lora_rank=16"),
        ({"lora_alpha": None}, "lora_alpha is missing: expected a number"),
        ({"lora_alpha": True}, "lora_alpha=True: expected a number"),
        ({"lora_alpha": "8"}, "lora_alpha='8': expected a number"),
        ({"lora_alpha": 1e300}, "lora_alpha=1e+300: expected a number"),
        ({"lora_alpha": 10**400}, "expected a number from -1000000 to 1000000"),
        ({"lora_alpha": float("nan")}, "isn't valid JSON"),
        ({"lora_alpha": float("inf")}, "lora_alpha=inf: expected a number"),
        ({"lora_alpha": "x" * 500_000}, "(500002 characters): expected a number"),
        ({"lora_alpha": [[[]] * 9] * 9000}, "characters): expected a number"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern=['q_proj']: expected an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj=0: expected an integer, at least 1"),
        ({"rank_pattern": {"q_proj": True}}, "rank_pattern: q_proj=True: expected an integer, at least 1"),
        ({"rank_pattern": {"q_proj": 5}}, "q_proj.lora_A.weight': shape (4, 32): expected (5, 32), because of r=5"),
        ({"rank_pattern": {"x" * 500_000: 0}}, "(500000 characters)=0: expected an integer"),
        ({"rank_pattern": {"x*" * 200_000: 1}}, "expected regular expressions of at most 1024 characters"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern: q_proj is missing: expected a number"),
        ({"alpha_pattern": {"(q+)+x": 1}}, "alpha_pattern={'(q+)+x': 1}: expected a module's name, or a regular"),
        ({"alpha_pattern": {f"p{i}": 1 for i in range(5000)}}, "expected at most 1024 patterns"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_a_config_with_wrong_values_is_refused_by_name(adapter: Path, changes: dict[str, Any], message: str) -> None:
    change_config(adapter, **changes)
    found = refused(adapter)
    assert message in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "isn't valid JSON"),
        (b"{", "isn't valid JSON"),
        (b"\xff\xfe{}", "isn't valid JSON"),
        (b'{"peft_type": "\\ud800"}', "isn't valid JSON"),
        (b'{"peft_type": "LORA", "r": 1e999}', "isn't valid JSON"),
        (b'{"peft_type": "LORA", "r": ' + b"9" * 10_000 + b"}", "isn't valid JSON"),
        (b"[1]", "holds a list, not a JSON object"),
        (b"null", "holds a NoneType, not a JSON object"),
        (b"{}", "peft_type is missing"),
        (b"[" * 500_000, "is nested too deeply"),
        (b'{"peft_type": ' * 50_000, "is nested too deeply"),
        (b'{"peft_type": ' + b"[" * 300 + b"]" * 300 + b"}", "expected 'LORA'"),
        (b" " * ((1 << 20) + 1), "has 1048577 bytes: expected at most 1048576"),
    ],
    ids=range(13),
)
def test_a_config_that_is_no_json_object_is_refused(adapter: Path, content: bytes, message: str) -> None:
    (adapter / "adapter_config.json").write_bytes(content)
    assert message in refused(adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda all_: all_.clear(), "has no tensors"),
        (lambda all_: all_.pop(Q_A), "q_proj.lora_B.weight': the file has no lora_A that belongs to it"),
        (lambda all_: all_.pop(UP_B), "up_proj.lora_A.weight': the file has no lora_B that belongs to it"),
        (lambda all_: all_.update({Q_A: torch.zeros(4, 33)}), "shape (4, 33): expected (4, 32), because of r=4"),
        (lambda all_: all_.update({Q_A: torch.zeros(32, 4)}), "shape (32, 4): expected (4, 32)"),
        (lambda all_: all_.update({Q_A: torch.zeros(128)}), "shape (128,): expected (4, 32)"),
        (lambda all_: all_.update({Q_A: torch.zeros(())}), "shape (): expected (4, 32)"),
        (lambda all_: all_.update({Q_A: torch.zeros([1] * 2000)}), "characters): expected (4, 32)"),
        (lambda all_: all_.update({UP_B: torch.zeros(32, 4)}), "shape (32, 4): expected (64, 4)"),
        (lambda all_: all_.update({Q_A: torch.zeros(4, 32, dtype=torch.int32)}), "dtype I32: expected F32 or BF16"),
        (lambda all_: all_.update({Q_A: torch.zeros(4, 32, dtype=torch.float64)}), "dtype F64: expected F32"),
        (lambda all_: all_.update({Q_A: torch.zeros(4, 32).to(torch.float8_e4m3fn)}), "dtype F8_E4M3: expected F32"),
        (
            lambda all_: all_.update({Q_A.replace(".weight", ".other.weight"): torch.zeros(4, 32)}),
            "q_proj.lora_A.weight': the file has",
        ),
    ],
    ids=range(13),
)
def test_lora_tensors_of_wrong_shapes_are_refused(
    adapter: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    change_tensors(adapter, change)
    found = refused(adapter)
    assert message in found
    assert str(adapter / "adapter_model.safetensors") in found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{PREFIX}2.self_attn.q_proj.lora_A.weight", "the model has 2 layers, from 0 on"),
        (f"{PREFIX}999999999999.self_attn.q_proj.lora_A.weight", "only lora_A and lora_B of self_attn.q_proj"),
        (f"{PREFIX}00.self_attn.q_proj.lora_A.weight", "only lora_A and lora_B of self_attn.q_proj"),
        (f"{PREFIX}-1.self_attn.q_proj.lora_A.weight", "only lora_A and lora_B of self_attn.q_proj"),
        (f"{PREFIX}\u0661.self_attn.q_proj.lora_A.weight", "only lora_A and lora_B of self_attn.q_proj"),
        (f"{PREFIX}0.self_attn.q_norm.lora_A.weight", "only lora_A and lora_B of self_attn.q_proj"),
        (f"{PREFIX}0.self_attn.q_proj.lora_C.weight", "only lora_A and lora_B of self_attn.q_proj"),
        (f"{PREFIX}0.self_attn.q_proj.weight", "only lora_A and lora_B of self_attn.q_proj"),
        (f"{PREFIX}0.mlp.experts.3.up_proj.lora_A.weight", "adapters of experts aren't supported"),
        (f"{PREFIX}0.mlp.experts.lora_A.weight", "adapters of experts aren't supported"),
        (f"{PREFIX}0.self_attn.q_proj.lora_magnitude_vector", "DoRA isn't supported"),
        (f"{PREFIX}0.self_attn.q_proj.lora_B.bias", "trained biases aren't supported"),
        ("base_model.model.lm_head.weight", "adapters of the head aren't supported"),
        ("x" * 1_000_000, "characters): only lora_A and lora_B"),
        ("", "tensor '': only lora_A and lora_B"),
        ("a\nb", r"tensor 'a\nb': only lora_A and lora_B"),
    ],
    ids=range(16),
)
def test_tensors_other_than_lora_matrices_are_refused_by_name(adapter: Path, name: str, message: str) -> None:
    change_tensors(adapter, lambda all_: all_.update({name: torch.zeros(4, 32)}))
    assert message in refused(adapter)


def header(content: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if size is None else size) + content


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08",
        header(b""),
        header(b"{}", 1 << 63),
        header(b"{}", 17 << 20),
        header(b"{}", 3),
        header(b"[]"),
        header(b"{" * 100_000),
        header(b'{"x": ' * 100_000),
        header(b'{"x": {"dtype": "F32", "shape": [4, 32], "data_offsets": [0, 512]}}'),
        header(b'{"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}') + bytes(4),
        header(b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}') + bytes(4),
        header(b'{"x": {"dtype": "F32", "shape": [9223372036854775807, 4], "data_offsets": [0, 4]}}') + bytes(4),
        header(b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}') + bytes(4),
        header(b'{"' + b"x" * 1_000_000 + b'": 1}'),
        header(b'{"\xff": 1}'),
    ],
    ids=range(16),
)
def test_damaged_tensors_are_refused(adapter: Path, content: bytes) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(content)
    assert str(adapter / "adapter_model.safetensors") in refused(adapter)


def test_a_truncated_adapter_file_is_refused(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    whole = file.read_bytes()
    for size in (4, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert f"{file} can't be read" in refused(adapter)


def test_missing_files_are_named(adapter: Path, tmp_path: Path) -> None:
    assert "isn't a directory: give the directory of an adapter" in refused(tmp_path / "nothing")
    assert "adapter_config.json' is a file: give a directory" in refused(adapter / "adapter_config.json")
    assert "isn't a directory" in refused(Path("a\0b"))
    assert refused(Path("x" * 5000))
    assert refused(Path("~nobody-of-this-name/adapter"))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert "has adapter_model.bin instead of adapter_model.safetensors" in refused(adapter)
    (adapter / "adapter_model.bin").unlink()
    assert f"{adapter / 'adapter_model.safetensors'} doesn't exist" in refused(adapter)
    (adapter / "adapter_config.json").unlink()
    assert f"{adapter / 'adapter_config.json'} doesn't exist" in refused(adapter)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_adapter_files_that_are_directories_or_pipes_are_refused(
    adapter: Path, name: str, make: Callable[[Path], None]
) -> None:
    (adapter / name).unlink()
    make(adapter / name)
    assert f"{adapter / name} isn't a file" in refused(adapter)


class TestGgufFiles:
    """Adapters as llama.cpp's convert_lora_to_gguf.py writes them."""

    @pytest.fixture
    def write(self, adapter: Path, tmp_path: Path) -> Callable[..., Path]:
        pytest.importorskip("gguf", reason="needs the extra gguf")
        from gguf_files import write_gguf_adapter  # it needs gguf

        make_adapter().get_base_model().config.save_pretrained(str(tmp_path))
        return lambda **given: write_gguf_adapter(tmp_path, adapter, "llama3", tmp_path / "adapter.gguf", **given)

    def test_modules_have_the_ranks_and_the_scaling_of_the_file(
        self, adapter: Path, write: Callable[..., Path]
    ) -> None:
        expected, found = read(adapter), read(write())
        assert {key: module[:2] for key, module in found.modules.items()} == {
            key: module[:2] for key, module in expected.modules.items()
        }
        assert found.num_parameters == expected.num_parameters
        assert {each.scaling for each in read(write(adapter__lora__alpha=0.0)).modules.values()} == {1.0}
        mistral = msgspec.structs.replace(SPEC, architecture="MistralForCausalLM")
        assert read(write(), mistral) == found
        assert "raise max_lora_rank" in refused(write(), max_lora_rank=3)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"general__type": "model"}, "general.type='model': expected 'adapter'"),
            ({"adapter__type": "control"}, "adapter.type='control': expected 'lora'"),
            ({"general__architecture": "mamba"}, "general.architecture='mamba': expected one of llama, qwen2"),
            ({"general__architecture": "qwen3"}, "='qwen3': expected that of GGUF files of LlamaForCausalLM"),
            ({"adapter__lora__alpha": 2e6}, "adapter.lora.alpha=2000000.0: expected a number from"),
            ({"adapter__lora__alpha": "big"}, "adapter.lora.alpha='big': expected a number from"),
            ({"adapter__alora__invocation_tokens": 3.0}, "activated LoRA isn't supported"),
        ],
        ids=range(7),
    )
    def test_other_files_are_refused_by_their_metadata(
        self, write: Callable[..., Path], changes: dict[str, Any], message: str
    ) -> None:
        file = write(**changes)
        assert message in refused(file)
        assert str(file) in refused(file)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (b"blk.2.attn_q.weight.lora_a", "the model has 2 layers, from 0 on"),
            (b"blk.1.attn_q.weight.lora_c", "only lora_A and lora_B of self_attn.q_proj"),
            (b"blk.1.attn_norm.weight.xxx", "trained norms aren't supported"),
            (b"blk.1.up_exps.weight.lora_", "adapters of experts aren't supported"),
            (b"token_embd....weight.lora_", "adapters of embeddings aren't supported"),
            (b"blk.1.attn_q.weight.lora_b", "it has tensor blk.1.attn_q.weight.lora_b twice"),
        ],
        ids=range(6),
    )
    def test_other_tensors_are_refused_by_name(self, write: Callable[..., Path], name: bytes, message: str) -> None:
        file = write()
        file.write_bytes(file.read_bytes().replace(b"blk.1.attn_q.weight.lora_a", name))
        assert message in refused(file)

    def test_damaged_and_missing_files_are_refused(self, write: Callable[..., Path], tmp_path: Path) -> None:
        file = write()
        file.write_bytes(file.read_bytes()[:-100])
        assert f"{file} can't be read" in refused(file)
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 20, 0) + bytes(33 << 20))
        assert "1,048,576 tensors follow, which the 16,777,200 bytes left of its header can't hold" in refused(file)
        part = file.rename(tmp_path / "adapter-00001-of-00002.gguf")
        assert "is named as one of 2 files" in refused(part)
        assert f"{file}' doesn't exist" in refused(file)
        assert "can't be read: File name too long" in refused(tmp_path / f"{'e' * 300}.gguf")
        os.mkfifo(file)
        assert f"{file} isn't a file" in refused(file)


def test_layers_that_keep_states_have_no_adapters(adapter: Path) -> None:
    state = DeltaSpec(
        layers=[True, False], num_k_heads=2, num_v_heads=2, k_dim=8, v_dim=8, conv_size=4, is_interleaved=False
    )
    stateful = msgspec.structs.replace(SPEC, state=state)
    assert "layers.0.self_attn.k_proj" in (message := refused(adapter, stateful))
    assert "keeps a state instead" in message

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.0.self_attn" in name]:
            del tensors[name]
        tensors[f"{PREFIX}0.linear_attn.out_proj.lora_A.weight"] = torch.zeros(4, 32)

    change_tensors(adapter, rename)
    assert "adapters of layers that keep a state aren't supported" in refused(adapter, stateful)


def test_projections_that_transformers_renames_are_known_by_both_names(adapter: Path) -> None:
    state = KdaSpec([True, False], num_v_heads=2, k_dim=8, v_dim=8, conv_size=4)
    spec = msgspec.structs.replace(SPEC, state=state)

    def replace_attention(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
        def replace(tensors: dict[str, torch.Tensor]) -> None:
            for old in [old for old in tensors if "layers.0." in old]:
                del tensors[old]
            tensors[f"{PREFIX}0.self_attn.{name}.lora_A.weight"] = torch.zeros(4, SPEC.hidden_size)
            tensors[f"{PREFIX}0.self_attn.{name}.lora_B.weight"] = torch.zeros(8, 4)

        return replace

    for name in ("f_a_proj", "forget_gate.f_a_proj"):
        change_tensors(adapter, replace_attention(name))
        assert (0, "self_attn.f_a_proj") in LoraSpec.read(adapter, spec, 64).modules


def test_adapters_of_convolutions_are_refused_and_those_of_their_projections_are_not(adapter: Path) -> None:
    state = ShortConvSpec([True, False], SPEC.hidden_size, conv_size=3, has_bias=False)
    spec = msgspec.structs.replace(SPEC, state=state)

    def replace_attention(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.0.self_attn" in name]:
            del tensors[name]
        tensors[f"{PREFIX}0.conv.in_proj.lora_A.weight"] = torch.zeros(4, SPEC.hidden_size)
        tensors[f"{PREFIX}0.conv.in_proj.lora_B.weight"] = torch.zeros(3 * SPEC.hidden_size, 4)

    def add_convolution(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{PREFIX}0.conv.conv.lora_A.weight"] = torch.zeros(4, SPEC.hidden_size, 3)

    change_tensors(adapter, replace_attention)
    assert (0, "conv.in_proj") in LoraSpec.read(adapter, spec, 64).modules
    change_tensors(adapter, add_convolution)
    assert "adapters of convolutions aren't supported" in refused(adapter, spec)
