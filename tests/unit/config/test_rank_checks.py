"""Options that an engine can't have with several ranks: the start refuses them, and so does each change to as many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

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


def test_ranks_that_share_experts_with_those_of_other_servers_keep_their_number(checkpoint: str) -> None:
    base = resolve(checkpoint, data_parallel_size=2)
    several = {"enable_expert_parallel": True, "num_ranks_of_servers": 4, "data_parallel_size_local": 2}
    shared = replace(base, parallel=replace(base.parallel, **several))
    check_num_ranks(shared)
    with pytest.raises(InvalidConfig, match="data_parallel_size=3: experts are shared with ranks of other servers"):
        check_num_ranks(shared.with_num_ranks(3))
