"""What `profiler_config` takes, and how it refuses the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raycore.config import ENGINE_OPTIONS, EngineConfig, changes, resolve
from raycore.config.profiler import ProfilerConfig, checked_prefix, session_config
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig, InvalidInput

TORCH = {"profiler": "torch", "torch_profiler_dir": "/tmp/traces"}


def resolved(value: object) -> ProfilerConfig | None:
    return resolve(demo_model_path(), profiler_config=value).profiler_config  # pyright: ignore


def test_profiler_config_takes_vllms_settings_as_object_or_json():
    config = resolved({**TORCH, "torch_profiler_with_stack": False, "delay_iterations": 2, "max_iterations": 3})
    assert config == ProfilerConfig(
        "/tmp/traces", torch_profiler_with_stack=False, delay_iterations=2, max_iterations=3
    )
    assert resolved(json.dumps(TORCH)) == resolved(TORCH) == ENGINE_OPTIONS["profiler_config"].parse(json.dumps(TORCH))
    assert resolved({}) is resolved({"profiler": None}) is resolved(None) is None


def test_a_relative_profile_directory_is_resolved_in_the_callers_directory():
    config = resolved({"profiler": "torch", "torch_profiler_dir": "traces"})
    assert config is not None
    assert config.torch_profiler_dir == str(Path("traces").absolute())


def test_a_profiler_config_is_equal_after_encoding_and_its_changes_are_named():
    old, new = resolve(demo_model_path()), resolve(demo_model_path(), profiler_config=TORCH)
    assert EngineConfig.decode(new.encode()) == new
    assert changes(old, new) == [f"profiler_config={new.profiler_config!r}, was None"]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("traces", "profiler_config='traces' isn't a JSON object"),
        ("[1]", r"profiler_config='\[1\]' isn't a dict"),
        ({"profiler": "torch"}, "torch_profiler_dir='' isn't a directory"),
        ({"profiler": "torch", "torch_profiler_dir": "s3://bucket"}, "torch_profiler_dir='s3://bucket'"),
        ({"torch_profiler_dir": "/tmp"}, "torch_profiler_dir='/tmp' needs profiler='torch'"),
        ({**TORCH, "profiler": "cuda"}, "cuda"),
        ({**TORCH, "depth": 3}, "depth"),
        ({**TORCH, "max_iterations": -1}, "max_iterations"),
        ({**TORCH, "torch_profiler_with_stack": "yes"}, "torch_profiler_with_stack"),
        ({**TORCH, "warmup_iterations": 2}, "warmup_iterations=2 is not supported: there is no profiler schedule"),
        ({**TORCH, "proton_data": "trace"}, "proton_data='trace' is not supported: only profiler='torch' is supported"),
    ],
)
def test_unsupported_profiler_settings_are_refused_by_name(value, match):
    with pytest.raises(InvalidConfig, match=match):
        resolved(value)


def test_vllms_other_profiler_settings_are_accepted_with_values_of_no_effect():
    settings = {"ignore_frontend": True, "torch_profiler_dump_cuda_time_total": True, "warmup_iterations": 0}
    assert resolved({**TORCH, **settings}) == resolved(TORCH)


def test_a_profile_session_may_override_delay_and_max_iterations():
    config = resolved({**TORCH, "delay_iterations": 2})
    session = session_config(config, max_iterations=7)
    assert (session.delay_iterations, session.max_iterations) == (2, 7)
    for wrong in ({"delay_iterations": -1}, {"max_iterations": True}, {"max_iterations": 1.5}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            session_config(config, **wrong)
    with pytest.raises(InvalidInput, match="option profiler_config"):
        session_config(None)


@pytest.mark.parametrize("prefix", ["", "../up", "a/b", ".hidden", "ä", "x" * 129, 3])
def test_a_profile_prefix_must_be_part_of_a_file_name(prefix):
    with pytest.raises(InvalidInput, match="profile_prefix="):
        checked_prefix(prefix)
    assert checked_prefix("run-1.a_b") == "run-1.a_b"


def test_profile_files_are_named_by_prefix_process_and_kind(tmp_path: Path):
    config = ProfilerConfig(str(tmp_path / "new"))
    path = config.trace_path("dp0_tp1", "run", "pt.trace")
    assert path.parent.is_dir()
    assert path.name.startswith("run_dp0_tp1.")
    assert path.name.endswith(".pt.trace.json.gz")
    plain = ProfilerConfig(str(tmp_path), torch_profiler_use_gzip=False).trace_path("dp0_engine", None, "trace")
    assert (plain.name.startswith("dp0_engine."), plain.suffix) == (True, ".json")
