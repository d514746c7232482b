"""What the tensors of an EAGLE-3 head must be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafting_checkpoints import random_head, write_checkpoint
from drafting_runners import CONFIG, SIZE
from small_model import SPEC

from raycore.errors import InvalidCheckpoint
from raycore.parts.drafts.checkpoint.eagle3 import load_eagle3_spec
from raycore.parts.drafts.weights.eagle3 import load_eagle3_weights
from raycore.weights.share import WeightShare


def test_an_eagle3_head_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    config = CONFIG | {"draft_vocab_size": 40}
    tensors = random_head(config)
    del tensors["d2t"]
    with pytest.raises(InvalidCheckpoint, match="no tensor d2t, which draft_vocab_size=40 needs"):
        _load(write_checkpoint(tmp_path / "no d2t", config, tensors))
    tensors = random_head(config)
    tensors["d2t"] += SPEC.vocab_size
    with pytest.raises(InvalidCheckpoint, match="aren't in the target's vocabulary"):
        _load(write_checkpoint(tmp_path / "wrong d2t", config, tensors))
    config = CONFIG | {"hidden_size": 24, "target_hidden_size": SIZE}
    with pytest.raises(InvalidCheckpoint, match="hidden_size=24 isn't that of the target's embedding, 32"):
        _load(write_checkpoint(tmp_path / "no embedding", config, random_head(config)))


def _load(path: Path) -> None:
    spec, head = load_eagle3_spec(path, SPEC)
    load_eagle3_weights(WeightShare(spec, torch.float32), head, path)
