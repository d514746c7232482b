"""What raycore reads in configurations that have no other files beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raycore.checkpoint.model_spec import load_model_spec
from raycore.models.spec import ModelSpec


def spec_of(
    path: Path, architecture: str = "LlamaForCausalLM", generation: dict[str, Any] | None = None, **config: Any
) -> ModelSpec:
    """The model of a config.json with these values, which is written to a folder."""
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return load_model_spec(path)
