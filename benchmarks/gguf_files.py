"""Writes checkpoints as GGUF files, by the names and the quantization of the package `gguf`, and the checkpoints that
transformers reads instead: with the numbers that the files' quantized tensors stand for.

    python benchmarks/gguf_files.py CHECKPOINT FILE.gguf --type Q8_0

The file gets the checkpoint's tokenizer, if that is one of byte-level merges. llama.cpp's `llama-quantize` makes files
of further types, such as Q4_K, of one in BF16.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from raycore.checkpoint.gguf.header import BLOCKS

ARCHITECTURES = {
    "llama2": "llama",
    "llama3": "llama",
    "multi_query": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "phi3_longrope": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "glm4": "glm4",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "hunyuan": "hunyuan-dense",
    "gemma": "gemma",
    "arcee": "arcee",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "stablelm_parallel": "stablelm",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "exaone4": "exaone4",
    "olmoe": "olmoe",
    "minimax_m2": "minimax-m2",
    "glm4_moe": "glm4moe",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5-moe",
    "afmoe": "afmoe",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
}
"""By the name of a family of `families`: GGUF's architecture."""
OPTIONS: dict[str, dict[str, Any]] = {
    # what GGUF doesn't say, and llama.cpp has only one value of
    "gemma2": {"query_pre_attn_scalar": 32, "num_hidden_layers": 4},
    "gemma3": {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": []},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None},
    "seed_oss": {"attention_out_bias": False},
    "gemma": {"attention_bias": False, "tie_word_embeddings": True},
    "cohere2": {"num_hidden_layers": 4, "layer_types": None},
    "olmo": {"attention_bias": False},
    "olmoe": {"attention_bias": False, "norm_topk_prob": False},
    "glm4_moe": {"n_group": 1, "topk_group": 1},
    "dots1": {"n_group": 1, "topk_group": 1, "attention_bias": False, "sliding_window": None, "layer_types": None},
    "ernie4_5_moe": {"moe_layer_end_index": -1},
    "afmoe": {"num_hidden_layers": 4, "layer_types": None, "attention_bias": False},
    "lfm2": {"conv_bias": False, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"routed_scaling_factor": 1.0, "tie_word_embeddings": True},
}
"""Sizes and parts of these families' checkpoints, where GGUF files can't have those of `families`."""
_PERMUTED = ("llama", "granite", "smollm3", "arcee", "olmo")
_NORMS_WITH_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
"""Architectures to whose norms' weights GGUF files have added 1."""
_LAYER_NORMS = ("command-r", "cohere2", "starcoder2", "stablelm", "nemotron", "olmo")
_EXPERTS = {
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "expert_weights_norm": ("norm_topk_prob",),
    "shortconv.l_cache": ("conv_L_cache",),
}
"""By the key of the metadata: what it is in config.json, by family."""
_MADE = ("Q4_K", "Q5_K", "Q6_K")
"""Types that the package can't write: blocks of random bits, with scales that fit a model."""
_BLOCK_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block has numbers in float16."""
_CUTS = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
"""By what cuts texts into words in a `tokenizer.json`: GGUF's name of it."""
_SPREADS = {"Q4_K": 300, "Q5_K": 600, "Q6_K": 1400}
"""The standard deviation of numbers of random bits whose block's scales are 1."""


def write_gguf(
    checkpoint: Path,
    family: str,
    path: Path,
    kind: str = "F32",
    *,
    kinds: Mapping[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    parts: int = 1,
    plain: Path | None = None,
) -> Path:
    """Write the checkpoint of `families` in the directory `checkpoint` as a GGUF file.

    Args:
        kind: the type of tensors of two dimensions or more, whose rows have whole blocks. Others are F32.
        kinds: another type for some of these tensors, by what their names have in them, such as `v_proj`.
        metadata: further entries of text, numbers and lists, such as those of a tokenizer.
        parts: number of files. With several, `path` is the name of none of them.
        plain: where the checkpoint is written with the numbers that the file has.

    Returns: the path of the first file.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    name = ARCHITECTURES[family]
    stored = {key: value for file in sorted(checkpoint.glob("*.safetensors")) for key, value in load_file(file).items()}
    writer = gguf.GGUFWriter(path, name, split_max_tensors=_per_part(stored, parts))
    _add_metadata(writer, name, config, metadata or {})
    tensors, numbers = _tensors(stored, name, config, lambda key: _kind_of(key, kind, kinds or {}))
    for key, (data, type_) in tensors.items():
        writer.add_tensor(key, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if plain is not None:
        shutil.copytree(checkpoint, plain, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
        save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    return path if parts == 1 else next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))))


def write_gguf_adapter(
    checkpoint: Path, adapter: Path, family: str, path: Path, kind: str = "F32", **metadata: str | float
) -> Path:
    """Write the adapter that PEFT has written to the directory `adapter` as a GGUF file, for the model in `checkpoint`.

    `metadata`: entries that replace usual ones, with `__` for a dot in their keys.

    Returns: `path`.
    """
    config, name = json.loads((checkpoint / "config.json").read_text()), ARCHITECTURES[family]
    given = {"general.type": "adapter", "adapter.type": "lora"}
    given["adapter.lora.alpha"] = float(json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"])
    given |= {key.replace("__", "."): value for key, value in metadata.items()}
    writer = gguf.GGUFWriter(path, str(given.pop("general.architecture", name)))
    for key, value in given.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(key, value)
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for key, tensor in load_file(adapter / "adapter_model.safetensors").items():
        own, _, side = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        values = tensor.float().numpy()
        rows = _order(f"{own}.weight", len(values), name, config) if side == "B" else None
        data, type_ = _quantized(values if rows is None else values[rows], kind, np.random.default_rng())
        writer.add_tensor(f"{names.get_name(own)}.weight.lora_{side.lower()}", data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind_of(key: str, kind: str, kinds: Mapping[str, str]) -> str:
    return next((own for part, own in kinds.items() if part in key), kind)


def _per_part(stored: dict[str, torch.Tensor], parts: int) -> int:
    return 0 if parts == 1 else -(-len(stored) // parts)


def _tensors(
    stored: dict[str, torch.Tensor], name: str, config: dict[str, Any], kind_of: Callable[[str], str]
) -> tuple[dict[str, tuple[np.ndarray, Kind]], dict[str, torch.Tensor]]:
    """Return the tensors of a GGUF file, and the numbers of a checkpoint."""
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors: dict[str, tuple[np.ndarray, Kind]] = {}
    numbers: dict[str, torch.Tensor] = {}
    rng = np.random.default_rng(len(stored))
    for key, group in _stacked(stored).items():
        if key == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        found = names.get_name(_as_the_converter(key), try_suffixes=(".weight", ".bias"))
        assert found is not None, key
        values = (
            np.stack([stored[each].float().numpy() for each in group])
            if len(group) > 1
            else stored[key].float().numpy()
        )
        rows = _order(key, values.shape[0], name, config)
        written = values if rows is None else values[rows]
        if name in _NORMS_WITH_ONE and key.endswith("norm.weight"):
            written = written + 1
        if key.endswith(("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")):
            written = written.reshape(-1)
        if key.endswith("conv.conv.weight"):
            written = written[:, 0]
        data, type_ = _quantized(written, kind_of(key), rng)
        tensors[found] = data, type_
        if type_ is not Kind.F32:
            meant = gguf.quants.dequantize(data, type_).reshape(written.shape)
            values = meant if rows is None else meant[np.argsort(rows)]
        for index, each in enumerate(group):
            one = values[index] if len(group) > 1 else values
            numbers[each] = torch.from_numpy(np.array(one, dtype=np.float32)).reshape(stored[each].shape)
    tensors |= _rotation_factors(config)
    return tensors, numbers


def _as_the_converter(key: str) -> str:
    """Return a tensor's name as llama.cpp's converter has it before it looks it up."""
    return key.replace("correction_bias", "correction.bias").replace("expert_bias", "expert_bias.bias")


def _stacked(stored: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return by name which tensors become one: all experts' of a layer, or all norms' of heads."""
    found: dict[str, list[str]] = {}
    renamed = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for key in sorted(stored, key=_numbers):
        group = re.sub(r"layernorm\.norms\.\d+\.", "layernorm.", key)
        if ".experts." in key:
            group = ".".join(renamed.get(part, part) for part in re.sub(r"experts\.\d+", "experts", key).split("."))
        found.setdefault(group, []).append(key)
    return found


def _numbers(key: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]


def _order(key: str, num_rows: int, name: str, config: dict[str, Any]) -> np.ndarray | None:
    """Return which row of a checkpoint each row of a GGUF file is. None: the same."""
    projection = re.search(r"\.([qk])_proj\.", key)
    if name not in _PERMUTED or projection is None:
        return None
    heads = config["num_attention_heads" if projection[1] == "q" else "num_key_value_heads"]
    return np.arange(num_rows).reshape(heads, 2, num_rows // heads // 2).swapaxes(1, 2).reshape(-1)


def _quantized(values: np.ndarray, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, Kind]:
    type_ = Kind[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    if values.ndim < 2 or values.shape[-1] % block:
        return np.ascontiguousarray(values, dtype=np.float32), Kind.F32
    if kind in _MADE:
        blocks = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), np.uint8)
        for at in _BLOCK_SCALES[kind]:
            scales = np.float16(float(values.std()) / _SPREADS[kind] * rng.uniform(0.5, 1.5, blocks.shape[:-1]))
            blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
        return blocks.reshape(*values.shape[:-1], -1), type_
    return gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), type_), type_


def _rotation_factors(config: dict[str, Any]) -> dict[str, tuple[np.ndarray, Kind]]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        lists = {f"rope_factors_{each}.weight": rope[f"{each}_factor"] for each in ("long", "short")}
        return {key: (np.array(values, np.float32), Kind.F32) for key, values in lists.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    kept = np.clip((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"]), 0, 1)
    return {"rope_freqs.weight": (np.float32(1 / ((1 - kept) / rope["factor"] + kept)), Kind.F32)}


def _add_metadata(writer: gguf.GGUFWriter, name: str, config: dict[str, Any], metadata: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        local, rope = rope.get("sliding_attention", {}), rope["full_attention"]
        assert name != "gemma3" or local["rope_theta"] == 10000.0
    num_heads = config["num_attention_heads"]
    experts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    eps = next(
        config[key]
        for key in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "clip_qkv")
        if key in config
    )
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if "alpha" in rope:
        theta *= rope["alpha"] ** (head_dim / (head_dim - 2))
    fraction = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    whole = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": num_heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or num_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": int(head_dim * fraction),
        "expert_count": next((config[key] for key in experts if config.get(key)), None),
        "expert_used_count": config.get("num_experts_per_tok") or config.get("moe_k"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "attention.sliding_window": None if name.startswith(("qwen", "olmo")) else config.get("sliding_window"),
    }
    broken = {
        f"attention.layer_norm_{'epsilon' if name in _LAYER_NORMS else 'rms_epsilon'}": eps or 1e-5,
        "rope.freq_base": theta,
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "attention.scale": config.get("attention_multiplier"),
        "logit_scale": config.get("logits_scaling") or config.get("logit_scale"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    if rope.get("rope_type") == "longrope":
        whole["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        broken["rope.scaling.attn_factor"] = rope["attention_factor"]
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_string(f"{name}.rope.scaling.type", rope["rope_type"])
        broken["rope.scaling.factor"] = rope["factor"]
        whole["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    types = config.get("layer_types") or []
    if name.startswith("lfm2"):
        heads = whole.pop("attention.head_count_kv")
        writer.add_array(f"{name}.attention.head_count_kv", [heads if "full" in each else 0 for each in types])
    if name == "exaone4" and types:
        writer.add_array(f"{name}.attention.sliding_window_pattern", [each.startswith("sliding") for each in types])
    for key, value in whole.items():
        if value is not None:
            writer.add_uint32(f"{name}.{key}", value)
    for key, value in broken.items():
        if value is not None:
            writer.add_float32(f"{name}.{key}", value)
    for key, theirs in _EXPERTS.items():
        value = next((config[each] for each in theirs if config.get(each) is not None), None)
        if value is not None:
            add_entry(writer, f"{name}.{key}", value)
    if name == "stablelm":  # llama.cpp's converter says so of all checkpoints without that key
        add_entry(writer, f"{name}.use_parallel_residual", True)
    for key, value in metadata.items():
        add_entry(writer, key, value)


def add_entry(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add an entry of the metadata: a number, a text, or a list."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def tokenizer_metadata(checkpoint: Path) -> dict[str, Any]:
    """Return the entries of a tokenizer of byte-level merges, which is in `tokenizer.json`."""
    config, stored = (json.loads((checkpoint / name).read_text()) for name in ("config.json", "tokenizer.json"))
    cuts = stored["pre_tokenizer"] or {"type": None}
    parts = tuple(each["type"] for each in cuts.get("pretokenizers", [cuts]))
    if parts not in _CUTS:
        raise SystemExit(f"{checkpoint}/tokenizer.json: expected a pre-tokenizer of {list(_CUTS)}, and it has {parts}")
    special = {each["id"]: each["content"] for each in stored["added_tokens"]}
    texts = {token_id: text for text, token_id in stored["model"]["vocab"].items()} | special
    ids = range(config["vocab_size"])
    kinds = gguf.TokenType
    plain = [kinds.NORMAL if token_id in texts else kinds.UNUSED for token_id in ids]
    entries = {
        "model": "gpt2",
        "pre": _CUTS[parts],
        "tokens": [texts.get(token_id, f"[PAD{token_id}]") for token_id in ids],
        "token_type": [int(kinds.CONTROL if token_id in special else plain[token_id]) for token_id in ids],
        "merges": [each if isinstance(each, str) else " ".join(each) for each in stored["model"]["merges"]],
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items() if value is not None}


def main() -> None:
    """Write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", default="BF16", choices=[each for each in BLOCKS if each not in _MADE])
    args = parser.parse_args()
    name = json.loads((args.checkpoint / "config.json").read_text())["model_type"]
    family = next((key for key, value in ARCHITECTURES.items() if name in (key, value)), None)
    if family is None:
        parser.error(f"{args.checkpoint} is of the type {name}: expected one of {sorted(ARCHITECTURES)}")
    entries = {"general.file_type": _file_type(args.type), "general.quantization_version": gguf.GGML_QUANT_VERSION}
    entries |= tokenizer_metadata(args.checkpoint)
    write_gguf(args.checkpoint, family, args.file, args.type, metadata=entries)


def _file_type(kind: str) -> int:
    """Return GGUF's number for files that have this type; OpenVINO reads none without it."""
    return int(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])


if __name__ == "__main__":
    main()
