"""Writes the small quantized checkpoints in tests/support/quantized, each with a tool that people use.

Run it once for each tool, in an environment of its own with transformers and the tool, and give it the tool's name:

    pip install compressed-tensors==0.20.0 loguru                 compressed-tensors
    pip install compressed-tensors==0.12.2 loguru                 ordered-groups
    pip install gptqmodel==7.7.0                                  gptqmodel
    unzip the wheel of auto-gptq 0.7.1, put it on PYTHONPATH      auto-gptq
    unzip the wheel of autoawq 0.2.7.post3, put it on PYTHONPATH  autoawq
    pip install torchao==0.18.0                                   torchao

Of auto-gptq and autoawq, only the packing code is imported, and the scales are this script's. So are torchao's integers
of 4 bits, which it only makes on GPUs. Every checkpoint is
a directory with config.json, model.safetensors, and dequantized.safetensors: the same model's quantized weights as the
tool dequantizes them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

DIRECTORY = Path(__file__).parent / "quantized"
VOCAB_SIZE = 64
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    # so that numbers aren't almost zero
    "initializer_range": 0.2,
}


def random_llama(dtype: torch.dtype, **changed: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | changed)).to(dtype).eval()


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head"}


def finish(path: Path, dequantized: dict[str, Tensor]) -> None:
    """Write the tool's own numbers, and leave nothing but what tests need."""
    save_file({name: tensor.contiguous() for name, tensor in dequantized.items()}, path / "dequantized.safetensors")
    for file in path.iterdir():
        if file.name not in ("config.json", "hf_quant_config.json", "model.safetensors", "dequantized.safetensors"):
            file.unlink()
    print(path.name, sum(file.stat().st_size for file in path.iterdir()))


def emptied(name: str) -> Path:
    path = DIRECTORY / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


# compressed-tensors


def weights(num_bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False, **more}


def group(targets: list[str], weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"targets": targets, "weights": weights, "input_activations": activations}


TOKENS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
FLOAT = {"type": "float"}
GROUPED = {"strategy": "tensor_group", "group_size": 16}
FOUR_BITS = {"num_bits": 4, "symmetric": True, "dynamic": "local", **GROUPED, **FLOAT}
BLOCKS = [12, 24]
"""Sizes that divide neither all outputs nor all inputs."""
COMPRESSED: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "int8": ([group(["Linear"], weights(8), TOKENS | {"type": "int"})], ["lm_head"]),
    "fp8": ([group(["Linear"], weights(8, **FLOAT), TOKENS | FLOAT)], ["lm_head"]),
    "fp8-tensor": ([group(["Linear"], weights(8, **FLOAT, strategy="tensor"), TOKENS | FLOAT)], ["lm_head"]),
    "fp8-static": (
        [
            group(
                ["Linear"],
                weights(8, **FLOAT, strategy="tensor"),
                TOKENS | FLOAT | {"strategy": "tensor", "dynamic": False},
            )
        ],
        ["lm_head"],
    ),
    "fp8-blocks": (
        [
            group(
                ["Linear"],
                weights(8, **FLOAT, strategy="block", block_structure=BLOCKS),
                TOKENS | FLOAT | {"strategy": "group", "group_size": 24},
            )
        ],
        ["lm_head"],
    ),
    "nvfp4": (
        [group(["Linear"], weights(4, **FLOAT, **GROUPED, scale_dtype="torch.float8_e4m3fn"), FOUR_BITS)],
        ["lm_head"],
    ),
    "mxfp4": (
        [group(["Linear"], weights(4, **FLOAT, strategy="group", group_size=32, scale_dtype="torch.uint8"))],
        ["lm_head"],
    ),
    "packed-4": ([group(["Linear"], weights(4, strategy="group", group_size=32))], ["lm_head"]),
    "packed-4-asymmetric": (
        [group(["Linear"], weights(4, strategy="group", group_size=16, symmetric=False))],
        ["lm_head"],
    ),
    "packed-4-rows": ([group(["Linear"], weights(4, symmetric=False))], ["lm_head"]),
    "packed-8": ([group(["Linear"], weights(8))], ["lm_head"]),
    "mixed": (
        [
            group(["re:.*self_attn.(q|k|v)_proj$", "lm_head"], weights(8, strategy="group", group_size=32)),
            group(["Linear"], weights(8), TOKENS | {"type": "int"}),
            group(["model.layers.0.mlp.gate_proj"], weights(4, strategy="group", group_size=8)),
        ],
        ["re:.*up_proj$", "model.layers.0.self_attn.v_proj"],
    ),
}


def write_compressed_tensors() -> None:
    for name, (groups, ignore) in COMPRESSED.items():
        model = random_llama(torch.bfloat16)
        path = emptied(f"compressed-tensors-{name}")
        compressor = quantize(model, groups, ignore)
        model.save_pretrained(path)
        compressor.update_config(str(path))
        compressor.decompress_model(model)
        finish(path, {f"{name}.weight": layer.weight.data for name, layer in quantized_layers(model).items()})
    write_experts()
    write_modelopt()


def write_modelopt() -> None:
    """The weights of compressed-tensors in NVFP4, as ModelOpt names them and describes them in a file of its own.

    Its scale of all weights multiplies, where that of compressed-tensors divides.
    """
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    written, path = DIRECTORY / "compressed-tensors-nvfp4", emptied("modelopt-nvfp4")
    stored, dequantized = load_file(written / "model.safetensors"), {}
    for layer in [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]:
        words = stored.pop(f"{layer}.weight_packed")
        stored[f"{layer}.weight"] = words
        of_all = 1 / stored.pop(f"{layer}.weight_global_scale").reshape(())
        stored[f"{layer}.weight_scale_2"] = of_all
        stored[f"{layer}.input_scale"] = 1 / stored.pop(f"{layer}.input_global_scale").reshape(())
        numbers = unpack_fp4_from_uint8(words, len(words), 2 * words.shape[1], torch.float32)
        scales = stored[f"{layer}.weight_scale"].float() * of_all
        dequantized[f"{layer}.weight"] = (numbers * scales.repeat_interleave(16, dim=1)).bfloat16()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((written / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config, indent=2))
    described = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    file = {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": described}
    (path / "hf_quant_config.json").write_text(json.dumps(file, indent=2))
    finish(path, dequantized)


def quantize(model: nn.Module, groups: list[dict[str, Any]], ignore: list[str]) -> Any:
    """Quantize the model as the tool does it, without calibration, and return its compressor."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    config = {f"group_{index}": each for index, each in enumerate(groups)}
    apply_quantization_config(model, QuantizationConfig(config_groups=config, ignore=ignore))
    for layer in quantized_layers(model).values():
        args = layer.quantization_scheme.weights
        grouped = grouped_numbers(layer.weight, args)
        of_all = None
        if args.strategy == "tensor_group":
            of_all = generate_gparam(layer.weight.amin(), layer.weight.amax())
            layer.weight_global_scale.data.copy_(of_all)
            layer.input_global_scale.data.fill_(100)
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args, global_scale=of_all)
        layer.weight_scale.data.copy_(scale.view(layer.weight_scale.shape))
        if getattr(layer, "input_scale", None) is not None:
            layer.input_scale.data.fill_(0.02)
        if getattr(layer, "weight_zero_point", None) is not None:
            layer.weight_zero_point.data.copy_(zero.view(layer.weight_zero_point.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return compressor


def grouped_numbers(weight: Tensor, args: Any) -> Tensor:
    """The numbers that share a scale, along the last dimension."""
    if args.strategy == "tensor":
        return weight.reshape(1, 1, -1)
    if args.strategy == "block":
        return blocks_of(weight, args.block_structure)
    return weight.unsqueeze(1) if args.strategy == "channel" else weight.unflatten(1, (-1, args.group_size))


def blocks_of(weight: Tensor, sizes: list[int]) -> Tensor:
    """The numbers of each block, [blocks of outputs, blocks of inputs, numbers]. Blocks at the end are padded."""
    (num_outputs, num_inputs), (outputs, inputs) = weight.shape, sizes
    padded = nn.functional.pad(weight, (0, -num_inputs % inputs, 0, -num_outputs % outputs))
    return padded.unflatten(1, (-1, inputs)).unflatten(0, (-1, outputs)).transpose(1, 2).flatten(2)


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "quantization_scheme")}


def write_experts() -> None:
    """transformers stacks the experts of a layer, which the tool doesn't quantize. So this is only a tree of layers."""
    config = MixtralConfig(**SHAPE | {"intermediate_size": 32}, num_local_experts=2, num_experts_per_tok=1)
    shapes = {name: (32, 16 if name[0] in "kv" else 32) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    layers = {f"self_attn.{name}": shape for name, shape in shapes.items()} | {"block_sparse_moe.gate": (32, 2)}
    for expert in range(2):
        layers |= {f"block_sparse_moe.experts.{expert}.{name}": (32, 32) for name in ("w1", "w2", "w3")}
    torch.manual_seed(0)
    model = nn.Module()
    for name, (num_inputs, num_outputs) in layers.items():
        add_layer(model, f"model.layers.0.{name}", nn.Linear(num_inputs, num_outputs, bias=False))
    add_layer(model, "model.embed_tokens", nn.Embedding(VOCAB_SIZE, 32))
    add_layer(model, "lm_head", nn.Linear(32, VOCAB_SIZE, bias=False))
    for name in ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"):
        add_layer(model, name, nn.RMSNorm(32))
    model.to(torch.bfloat16)
    path = emptied("compressed-tensors-experts")
    groups = [group(["Linear"], weights(4, strategy="group", group_size=16))]
    compressor = quantize(model, groups, ["re:.*gate$", "lm_head"])
    save_file(model.state_dict(), path / "model.safetensors", {"format": "pt"})
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(path)
    compressor.update_config(str(path))
    compressor.decompress_model(model)
    finish(path, {f"{name}.weight": layer.weight.data for name, layer in quantized_layers(model).items()})


def add_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if not hasattr(model, parent):
            model.add_module(parent, nn.Module())
        model = model.get_submodule(parent)
    model.add_module(last, layer)


def write_ordered_groups() -> None:
    """Newer versions of compressed-tensors can't write weight_g_idx."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    size = 16
    args = QuantizationArgs(**weights(4, strategy="group", group_size=size, actorder="group"))
    model = random_llama(torch.bfloat16)
    stored = dict(model.state_dict())
    dequantized: dict[str, Tensor] = {}
    compressor = BaseCompressor.load_from_registry("pack-quantized")
    for name in linear_layers(model):
        weight = stored.pop(f"{name}.weight")
        num_inputs = weight.shape[1]
        order = torch.randperm(num_inputs)
        g_idx = torch.empty(num_inputs, dtype=torch.int32)
        g_idx[order] = (torch.arange(num_inputs) // size).int()
        grouped = weight[:, order].unflatten(1, (-1, size))
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        packed = compressor.compress_weight(weight, scale, args, zero, g_idx)
        tensors = {**packed, "weight_scale": scale, "weight_g_idx": g_idx}
        stored |= {f"{name}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
        dequantized[f"{name}.weight"] = compressor.decompress_weight(tensors, args)
    path = emptied("compressed-tensors-packed-4-ordered")
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}},
        "ignore": ["lm_head"],
    }
    write_config(path, model, config)
    finish(path, dequantized)


def write_config(path: Path, model: LlamaForCausalLM, quantization: dict[str, Any]) -> None:
    model.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config, indent=2))


# GPTQ and AWQ

GPTQ = {
    "gptq-4": {"bits": 4, "group_size": 32},
    "gptq-4-ordered-v2": {"bits": 4, "group_size": 16, "desc_act": True, "sym": False, "format": "gptq_v2"},
    "gptq-8-ordered": {"bits": 8, "group_size": 16, "desc_act": True},
    "gptq-mixed": {
        "bits": 4,
        "group_size": -1,
        "act_group_aware": False,
        "dynamic": {"-:.*down_proj": {}, "+:.*up_proj": {"bits": 8, "group_size": 32}},
    },
    "gptqmodel-awq": {"bits": 4, "group_size": 16, "sym": False, "quant_method": "awq", "format": "gemm"},
}


def write_gptqmodel() -> None:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "4")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"t{token}": token for token in range(VOCAB_SIZE)}, unk_token="t0")
    special = {f"{kind}_token": f"t{token}" for token, kind in enumerate(("unk", "bos", "eos", "pad"))}
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, VOCAB_SIZE, (32, 48), generator=generator).tolist()
    data = [{"input_ids": prompt, "attention_mask": [1] * len(prompt)} for prompt in prompts]
    for name, options in GPTQ.items():
        # for AWQ, the tool needs multiples of 64 outputs
        wide = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 8, "head_dim": 8}
        with tempfile.TemporaryDirectory() as plain:
            random_llama(torch.float16, **(wide if name.endswith("awq") else {})).save_pretrained(plain)
            PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(plain)
            path = emptied(name)
            model = GPTQModel.load(plain, QuantizeConfig(**({"desc_act": False, "sym": True} | options), device="cpu"))
            model.quantize(data, batch_size=8)
            model.save(path)
            method = "AWQ" if name.endswith("awq") else "GPTQ"
            loaded = GPTQModel.load(str(path), backend=BACKEND[f"{method}_TORCH"], device="cpu", dtype=torch.float16)
            layers = {name: layer for name, layer in loaded.model.named_modules() if hasattr(layer, "qweight")}
            if method == "AWQ":
                from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

                numbers = {
                    name: dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, layer.group_size)
                    for name, layer in layers.items()
                }
            else:
                numbers = {name: layer.dequantize_weight() for name, layer in layers.items()}
            finish(path, {f"{name}.weight": tensor.t() for name, tensor in numbers.items()})


def write_layers(
    name: str, quantization: dict[str, Any], quantized: Callable[[nn.Linear], tuple[dict[str, Tensor], Tensor]]
) -> None:
    """Write a checkpoint whose layers' tensors, and their weights as the tool dequantizes them, `quantized` returns."""
    # auto-gptq can't pack fewer than 32 outputs, so all projections of attention have 32
    model = random_llama(torch.float16, num_key_value_heads=8)
    stored, dequantized = dict(model.state_dict()), {}
    for layer_name, layer in linear_layers(model).items():
        del stored[f"{layer_name}.weight"]
        tensors, dequantized[f"{layer_name}.weight"] = quantized(layer)
        stored |= {f"{layer_name}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
    path = emptied(name)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    write_config(path, model, quantization)
    finish(path, dequantized)


def import_alone(package: str, *names: str) -> list[types.ModuleType]:
    """Import modules without running the `__init__` files of the packages that they are in."""
    root = importlib.util.find_spec(package)
    assert root is not None
    assert root.submodule_search_locations is not None
    (location,) = root.submodule_search_locations
    parts = [name.split(".") for name in names]
    for parent in {".".join(part[:depth]) for part in parts for depth in range(1, len(part))}:
        module = types.ModuleType(parent)
        module.__path__ = [str(Path(location, *parent.split(".")[1:]))]
        sys.modules[parent] = module
    return [importlib.import_module(name) for name in names]


def group_parameters(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points, [O, G], with which a group's numbers are spread over 0 to 15."""
    grouped = weight.float().unflatten(1, (-1, size))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half()
    return scales, (-low / scales.float()).round().clamp(1, 15)


def write_auto_gptq() -> None:
    (module,) = import_alone("auto_gptq", "auto_gptq.nn_modules.qlinear.qlinear_cuda_old")

    def quantized(layer: nn.Linear) -> tuple[dict[str, Tensor], Tensor]:
        num_outputs, num_inputs = layer.weight.shape
        packed = module.QuantLinear(4, 16, num_inputs, num_outputs, bias=False)
        packed.pack(layer, *group_parameters(layer.weight.data, 16), None)
        return packed.state_dict(), packed(torch.eye(num_inputs, dtype=torch.float16)).t()

    write_layers(
        "auto-gptq-4-asymmetric",
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False},
        quantized,
    )


def write_autoawq() -> None:
    gemm, packing = import_alone("awq", "awq.modules.linear.gemm", "awq.utils.packing_utils")

    def quantized(layer: nn.Linear) -> tuple[dict[str, Tensor], Tensor]:
        scales, zeros = (each.t().contiguous() for each in group_parameters(layer.weight.data, 16))
        packed = gemm.WQLinear_GEMM.from_linear(layer, 4, 16, scales=scales, zeros=zeros)
        return packed.state_dict(), packing.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, 16).t()

    write_layers(
        "autoawq-4",
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 16,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": None,
        },
        quantized,
    )


# TorchAO


def torchao_configs() -> dict[str, Any]:
    from torchao import quantization as ao

    per_group, mixed = ao.PerGroup(16), ao.FqnToConfig
    return {
        "int8": ao.Int8WeightOnlyConfig(),
        "int8-dynamic": ao.Int8DynamicActivationInt8WeightConfig(),
        "intx": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=per_group, mapping_type=ao.MappingType.ASYMMETRIC
        ),
        "fp8": ao.Float8WeightOnlyConfig(),
        "fp8-dynamic": ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()),
        "mixed": mixed(
            {
                r"re:model\.layers\..+\.self_attn\.[qk]_proj": ao.Int8WeightOnlyConfig(),
                "model.layers.0.self_attn.v_proj": None,
                "model.layers.0.mlp.up_proj.weight": ao.Float8WeightOnlyConfig(),
                "re:.*embed_tokens": ao.IntxWeightOnlyConfig(weight_dtype=torch.int8),
                "_default": ao.Int8WeightOnlyConfig(granularity=ao.PerRow()),
            }
        ),
    }


def write_torchao() -> None:
    from torchao.quantization import quant_api
    from transformers import AutoModelForCausalLM, TorchAoConfig

    quant_api._check_hardware_support = lambda *_: None  # it is needed to multiply only
    for name, config in torchao_configs().items():
        with tempfile.TemporaryDirectory() as plain:
            dtype = torch.bfloat16 if name == "fp8-dynamic" else torch.float32
            random_llama(dtype).save_pretrained(plain)
            described = TorchAoConfig(config, include_input_output_embeddings=name == "mixed")
            model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=described, dtype=dtype)
        path = emptied(f"torchao-{name}")
        model.save_pretrained(path)
        quantized = {key: each for key, each in model.state_dict().items() if type(each) is not Tensor}
        finish(path, {key: each.float().dequantize() for key, each in quantized.items()})
    write_torchao_int4()


def write_torchao_int4() -> None:
    """The numbers are those of the kernels' formula: an integer from -8 to 7, times the scale, plus the zero point."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int4Tensor, Int4WeightOnlyConfig
    from transformers import TorchAoConfig

    model, size = random_llama(torch.bfloat16), 16
    stored, dequantized = dict(model.state_dict()), {}
    for name, layer in linear_layers(model).items():
        grouped = layer.weight.data.float().unflatten(1, (-1, size))
        low, high = grouped.amin(-1), grouped.amax(-1)
        scales = ((high - low) / 15).bfloat16()
        zeros = (low + 8 * scales.float()).bfloat16()
        integers = ((grouped - zeros.float().unsqueeze(2)) / scales.float().unsqueeze(2)).round().clamp(-8, 7)
        numbers = integers * scales.float().unsqueeze(2) + zeros.float().unsqueeze(2)
        dequantized[f"{name}.weight"] = numbers.flatten(1)
        pairs = integers.flatten(1).to(torch.int8)
        bytes_ = pairs[:, 0::2] & 15 | pairs[:, 1::2] << 4
        transposed = scales.t().contiguous(), zeros.t().contiguous()
        stored[f"{name}.weight"] = Int4Tensor(bytes_, *transposed, [1, size], layer.weight.shape)
    tensors, metadata = flatten_tensor_state_dict(stored)
    path = emptied("torchao-int4")
    save_file(tensors, path / "model.safetensors", metadata | {"format": "pt"})
    write_config(path, model, TorchAoConfig(Int4WeightOnlyConfig(group_size=size)).to_dict())
    finish(path, dequantized)


WRITERS = {
    "compressed-tensors": write_compressed_tensors,
    "ordered-groups": write_ordered_groups,
    "gptqmodel": write_gptqmodel,
    "auto-gptq": write_auto_gptq,
    "autoawq": write_autoawq,
    "torchao": write_torchao,
}

if __name__ == "__main__":
    WRITERS[sys.argv[1]]()
