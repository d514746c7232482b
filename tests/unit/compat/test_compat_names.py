"""`vllm` means raycore: the names of the package and of its submodules, and what is said of those it doesn't have."""

from __future__ import annotations

import importlib
import pickle
import sys

import pytest

import raycore
import raycore.compat.vllm as vllm
from raycore.compat.names import COMMANDS, MODULES, NAMES, REASONS, WHOLE, reason


@pytest.mark.parametrize("module", sorted(NAMES))
def test_every_name_of_the_table_can_be_imported(module):
    found = importlib.import_module(f"vllm.{module}" if module else "vllm")
    missing = [name for name in NAMES[module] if getattr(found, name, None) is None]
    assert missing == []
    assert set(NAMES[module]) <= set(dir(found))


def test_both_names_mean_one_module():
    public = importlib.import_module("vllm.entrypoints.llm")
    own = importlib.import_module("raycore.compat.vllm.entrypoints.llm")
    assert public is own
    assert importlib.import_module("vllm") is vllm
    assert vllm.entrypoints.llm is own
    own = importlib.import_module("raycore.compat.vllm.v1.engine.async_llm")
    assert importlib.import_module("vllm.v1.engine.async_llm") is own
    assert own.__spec__.name == own.__name__ == "raycore.compat.vllm.v1.engine.async_llm"


def test_the_names_are_raycores_own_objects():
    from vllm.sampling_params import SamplingParams

    assert SamplingParams is vllm.SamplingParams is raycore.SamplingParams
    params = pickle.loads(pickle.dumps(vllm.SamplingParams(top_k=3)))
    assert params == raycore.SamplingParams(top_k=3)
    assert b"vllm" not in pickle.dumps(params)


def test_a_settings_class_is_what_the_options_take():
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(kv_connector="OffloadConnector", kv_role="kv_both")
    config.kv_connector_extra_config = {"cpu_bytes_to_use": 1}
    assert config == KVTransferConfig.from_cli(
        '{"kv_connector": "OffloadConnector", "kv_role": "kv_both", '
        '"kv_connector_extra_config": {"cpu_bytes_to_use": 1}}'
    )
    assert config.kv_role == "kv_both"
    with pytest.raises(AttributeError, match="KVTransferConfig was given no engine_id"):
        _ = config.engine_id
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_missing_name_is_an_error_with_the_reason():
    with pytest.raises(ImportError, match=r"raycore has no vllm\.initialize_ray_cluster: an engine joins or starts"):
        from vllm import initialize_ray_cluster  # noqa: F401
    with pytest.raises(ImportError, match=r"no vllm\.sampling_params\.GuidedDecodingParams: removed by vLLM: use Str"):
        from vllm.sampling_params import GuidedDecodingParams  # noqa: F401
    with pytest.raises(ImportError, match=r"raycore has no vllm\.v1\.core: it is a part of vLLM's engine"):
        importlib.import_module("vllm.v1.core.sched.scheduler")
    with pytest.raises(ImportError, match=r"raycore has no vllm\.assets: vLLM downloads these samples"):
        importlib.import_module("vllm.assets.image")
    with pytest.raises(AttributeError, match=r"raycore has no vllm\.ModelRegistry: raycore's models are its own"):
        _ = vllm.ModelRegistry
    assert not hasattr(vllm, "Nothing")
    assert not hasattr(importlib.import_module("vllm.config"), "__nothing__")


def test_no_reason_is_given_for_what_exists():
    known = {name for module, names in NAMES.items() for name in (f"{module}.{each}".lstrip(".") for each in names)}
    assert set(REASONS) & (known | set(COMMANDS) | set(WHOLE)) == set()
    assert reason("v1.core.x") == REASONS["v1"]
    assert reason("something") == REASONS[""]
    # what has a reason as a whole may have modules that exist
    assert "v1.engine.async_llm" in MODULES


def test_variables_of_the_environment_are_those_that_are_set(monkeypatch):
    import vllm.envs

    monkeypatch.setenv("VLLM_PORT", "8000")
    assert vllm.envs.VLLM_PORT == "8000"
    with pytest.raises(AttributeError, match="VLLM_HOST_IP isn't set, and has no default"):
        _ = vllm.envs.VLLM_HOST_IP
    assert sys.modules["vllm.envs"] is importlib.import_module("raycore.compat.environment")
