"""Models that pool end their steps with a head that pools, and others don't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raycore.config import resolve
from raycore.parts.pooling.runner import PoolingHead
from raycore.parts.pooling.worker import PoolsHidden
from raycore.worker.core import WorkerCore
from raycore.worker.rank import WorkerRank

ALONE = WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1)
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def test_a_model_that_pools_has_one_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    plain, pooling = (resolve(tmp_path, load_format="dummy", runner=each) for each in ("generate", "pooling"))
    assert (PoolsHidden.is_needed(plain), PoolsHidden.is_needed(pooling)) == (False, True)
    core: Any = WorkerCore(pooling, ALONE)
    core.model = type("Model", (), {"heads": None})
    (head,) = PoolsHidden(core).heads(None)  # pyright: ignore[reportArgumentType]
    assert isinstance(head, PoolingHead)
