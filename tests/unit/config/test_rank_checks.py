"""Options that an engine can't have with several ranks: the start refuses them, and so does each change to as many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycore.config import resolve
from raycore.config.rank_checks import check_num_ranks
from raycore.errors import InvalidConfig


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MixtralForCausalLM"]}))
    return str(tmp_path)


def test_a_server_of_one_rank_gets_no_other(checkpoint: str) -> None:
    options: dict[str, Any] = {"data_parallel_size": 4, "data_parallel_rank": 1, "data_parallel_external_lb": True}
    one = resolve(checkpoint, **options)
    check_num_ranks(one)
    with pytest.raises(InvalidConfig, match="data_parallel_rank=1 has one rank"):
        check_num_ranks(one.with_num_ranks(2))
