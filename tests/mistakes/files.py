"""Broken checkpoints and other files of mistakes, each made of the bundled model's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from raycore.demo import demo_model_path

_ADAPTER_FILE = "adapter_model.safetensors"
_INDEX = "model.safetensors.index.json"


def write_files(folder: Path) -> None:
    """Write all of them into `folder`, under the names that the tables have."""
    (folder / "notes.txt").write_text("no model\n")
    (folder / "empty").mkdir()
    (folder / "yaml.yaml").write_text("dtype: [float32\n")
    (folder / "unknown.yaml").write_text("dtipe: float32\n")
    (folder / "template.jinja").write_text("{% for message in messages %}{{ message.content }}")
    (folder / "requests.jsonl").write_text(
        json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1 + 1 ="}}) + "\n"
    )
    (folder / "broken.jsonl").write_text('{"custom_id": "1", "method": "POST"\n')
    (folder / "file.gguf").write_bytes(b"GGUF" + bytes(3))
    (folder / "page.gguf").write_text("<!DOCTYPE html><html>Not found</html>")
    for name, spoil in _CHECKPOINTS.items():
        copy = Path(shutil.copytree(demo_model_path(), folder / name))
        spoil(copy)
    for name, spoil in _ADAPTERS.items():
        adapter = folder / name
        adapter.mkdir()
        halves = {"lora_A": np.zeros((4, 128), np.float32), "lora_B": np.zeros((128, 4), np.float32)}
        prefix = "base_model.model.model.layers.0.self_attn.q_proj"
        save_file({f"{prefix}.{half}.weight": numbers for half, numbers in halves.items()}, adapter / _ADAPTER_FILE)
        _write_json(
            adapter / "adapter_config.json",
            {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
        )
        spoil(adapter)


def _changed(name: str, **fields: object) -> Callable[[Path], None]:
    """Change fields of a JSON file; those that are None are removed."""

    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text()) | fields
        _write_json(folder / name, {key: value for key, value in found.items() if value is not None})

    return change


def _written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


def _truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def _without_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    shards = {name: f"model-0000{n}-of-00002.safetensors" for n, name in enumerate(names, 1)}
    _write_json(folder / _INDEX, {"metadata": {}, "weight_map": shards})


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


_LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
_CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "half": _truncated,
    "no-shard": _without_shard,
    "lfs": _written("model.safetensors", _LFS_POINTER),
    "lfs-config": _written("config.json", _LFS_POINTER),
    "broken-config": _written("config.json", '{"architectures": ["LlamaForCausalLM"'),
    "no-config": _without("config.json"),
    "no-weights": _without("model.safetensors"),
    "pickled": _pickled,
    "unknown-architecture": _changed("config.json", architectures=["WeirdForCausalLM"], model_type="weird"),
    "text-encoder": _changed("config.json", architectures=["T5ForConditionalGeneration"], model_type="t5"),
    "other-size": _changed("config.json", hidden_size=256, head_dim=64),
    "more-layers": _changed("config.json", num_hidden_layers=5),
    "quantized": _changed("config.json", quantization_config={"quant_method": "aqlm"}),
    "no-tokenizer": _without("tokenizer.json", "tokenizer_config.json"),
    "broken-tokenizer": _written("tokenizer.json", "{}"),
    "no-template": _changed("tokenizer_config.json", chat_template=None),
}
_ADAPTERS: dict[str, Callable[[Path], None]] = {
    "adapter-without-weights": _without(_ADAPTER_FILE),
    "adapter-of-another-kind": _changed("adapter_config.json", peft_type="IA3"),
    "broken-adapter": _written(_ADAPTER_FILE, "no tensors"),
    "adapter-of-high-rank": _changed("adapter_config.json", r=4096),
}
