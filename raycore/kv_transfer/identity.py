"""What says that two engines compute the same keys and values for the same tokens, besides the layout of blocks."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec

from raycore.checkpoint.gguf.header import part_names
from raycore.config import EngineConfig

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".json", ".gguf")


def weights_identity(config: EngineConfig) -> str:
    """Return a text that is another one if the weights are others: by the names, sizes and times of their files."""
    model, path = config.model, Path(config.model.model)
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(path.iterdir() if path.is_dir() else map(path.with_name, part_names(path.name)))
        if file.suffix in _WEIGHT_SUFFIXES and file.is_file()
    ]
    seed = model.seed if model.load_format == "dummy" else None
    parts = (str(path), files, model.load_format, seed, model.quantization, model.model_loader_extra_config)
    return blake2b(msgspec.msgpack.encode(parts), digest_size=16).hexdigest()
