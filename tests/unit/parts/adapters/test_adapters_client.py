from __future__ import annotations

from pathlib import Path

import pytest
from configs import SPEC
from peft_adapters import save_adapter

from raycore.config import LoRAConfig
from raycore.errors import InvalidRequest
from raycore.lora.request import LoRARequest
from raycore.parts.adapters.client import AdapterChecks

ON = LoRAConfig(enable_lora=True, max_lora_rank=8)


def test_an_adapters_directory_is_read_once(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    checks, adapter = AdapterChecks(SPEC, ON), LoRARequest("a", 1, str(tmp_path))
    checks.check(adapter)
    (tmp_path / "adapter_config.json").unlink()
    checks.check(adapter)
    with pytest.raises(InvalidRequest, match="adapter_config"):
        checks.check(LoRARequest("b", 2, str(tmp_path)))


@pytest.mark.parametrize(
    ("config", "load_inplace", "message"),
    [
        (LoRAConfig(), False, "'a' needs an engine with enable_lora=True"),
        (LoRAConfig(enable_lora=True, max_lora_rank=2), False, "max_lora_rank"),
        (ON, True, "load_inplace=True is for add_lora"),
    ],
)
def test_an_adapter_that_the_engine_cannot_use_is_refused(
    tmp_path: Path, config: LoRAConfig, load_inplace: bool, message: str
) -> None:
    save_adapter(tmp_path)
    with pytest.raises(InvalidRequest, match=message):
        AdapterChecks(SPEC, config).check(LoRARequest("a", 1, str(tmp_path), load_inplace=load_inplace))
