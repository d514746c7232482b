"""Options that an engine can't have with several ranks: the start refuses them, and so does each change to as many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycore.config import resolve
from raycore.config.rank_checks import check_num_ranks
from raycore.errors import InvalidConfig

SHARES = {"enable_expert_parallel": True}
OFFLOADS = {"kv_transfer_config": {"kv_connector": "OffloadConnector", "kv_role": "kv_both"}}
CASES = {
    "a connector": (OFFLOADS, "kv_transfer_config's OffloadConnector can't be used with ranks that share experts"),
    "an offload by size": ({"kv_offloading_size": 1}, "OffloadConnector can't be used with ranks that share experts"),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MixtralForCausalLM"]}))
    return str(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_experts_are_refused_at_the_start_and_later(checkpoint: str, case: str) -> None:
    options, message = CASES[case]
    one = resolve(checkpoint, **SHARES, **options)
    check_num_ranks(one)
    for make in (
        lambda: resolve(checkpoint, **SHARES, **options, data_parallel_size=2),
        lambda: check_num_ranks(one.with_num_ranks(2)),
    ):
        with pytest.raises(InvalidConfig, match=f"data_parallel_size=2: .*{message}"):
            make()
    several = resolve(checkpoint, **options, data_parallel_size=2)
    check_num_ranks(several.with_num_ranks(3))


def test_a_server_of_one_rank_gets_no_other(checkpoint: str) -> None:
    options: dict[str, Any] = {"data_parallel_size": 4, "data_parallel_rank": 1, "data_parallel_external_lb": True}
    one = resolve(checkpoint, **options)
    check_num_ranks(one)
    with pytest.raises(InvalidConfig, match="data_parallel_rank=1 has one rank"):
        check_num_ranks(one.with_num_ranks(2))
