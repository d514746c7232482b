"""What can't return experts is refused when an engine is configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import make_checkpoint

from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"enable_return_routed_experts=True can't be used with .* has no experts"):
        resolve(demo_model_path(), enable_return_routed_experts=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}}, "kv_transfer_config"),
        ({"model_impl": "transformers"}, "omit it"),
        ({"prefill_context_parallel_size": 2, "device": "cpu"}, "prefill_context_parallel_size=2"),
    ],
)
def test_what_computes_or_gets_tokens_elsewhere_is_refused(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = make_checkpoint("mixtral", tmp_path)
    assert resolve(path, enable_return_routed_experts=True).cache_limits.first_keeps_all
    with pytest.raises(InvalidConfig, match=f"enable_return_routed_experts=True can't be used with .*{named}"):
        resolve(path, enable_return_routed_experts=True, **options)
