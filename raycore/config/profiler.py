"""The option `profiler_config`: what a profile of steps records, and where its files go. Does not import torch."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.errors import InvalidConfig, InvalidInput
from raycore.options.declared import json_object, settings_of
from raycore.options.vllm_options import VllmOption, without_effect

_Count = Annotated[int, Meta(ge=0)]

_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ProfilerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's settings of its torch profiler, under vLLM's names."""

    torch_profiler_dir: str
    """Directory of the files, on each node. Created if it is missing."""
    profiler: Literal["torch"] = "torch"
    torch_profiler_with_stack: bool = True
    """Whether workers record Python functions. Makes steps several times slower."""
    torch_profiler_record_shapes: bool = False
    """Whether workers record the shapes of operations' inputs."""
    torch_profiler_with_memory: bool = False
    """Whether workers record allocations."""
    torch_profiler_with_flops: bool = False
    """Whether workers record estimates of operations' floating-point operations."""
    torch_profiler_use_gzip: bool = True
    """Whether files are compressed."""
    delay_iterations: _Count = 0
    """Number of steps that each rank runs before recording begins."""
    max_iterations: _Count = 0
    """Number of recorded steps after which the profile ends by itself. 0: it lasts until `stop_profile()`."""

    def trace_path(self, name: str, prefix: str | None, kind: str) -> Path:
        """The path of a new file for the process `name`, such as `dp0_tp0`. Creates the directory.

        `kind` distinguishes files of different tools: torch's end in `pt.trace.json`.
        """
        directory = Path(self.torch_profiler_dir)
        directory.mkdir(parents=True, exist_ok=True)
        stem = f"{prefix}_{name}" if prefix else name
        suffix = ".gz" if self.torch_profiler_use_gzip else ""
        return directory / f"{stem}.{time.time_ns()}.{kind}.json{suffix}"


def session_config(
    config: ProfilerConfig | None, delay_iterations: int | None = None, max_iterations: int | None = None
) -> ProfilerConfig:
    """The configuration of one profile: `config`, with those of the other arguments that aren't None.

    Raises:
        InvalidInput: a value is negative or not an integer, or `config` is None.
    """
    if config is None:
        raise InvalidConfig(
            "profiles need the option profiler_config: start the engine with, for example, "
            "profiler_config={'profiler': 'torch', 'torch_profiler_dir': '/tmp/profiles'}"
        )
    given = {"delay_iterations": delay_iterations, "max_iterations": max_iterations}
    chosen = {name: value for name, value in given.items() if value is not None}
    for name, value in chosen.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInput(f"{name}={value!r} isn't an integer, 0 or more")
    return msgspec.structs.replace(config, **chosen)


def checked_prefix(prefix: str | None) -> str | None:
    """Return `prefix` if it can begin the names of files.

    Raises:
        InvalidInput: it can't.
    """
    if prefix is not None and (not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidInput(
            f"profile_prefix={prefix!r}: use 1 to 128 letters, digits, '.', '_' and '-', beginning with a letter or a "
            "digit"
        )
    return prefix


_ONLY_TORCH = "only profiler='torch' is supported"

_WITHOUT_EFFECT = (
    VllmOption("torch_profiler_activities", (None,), "workers record their CPU, and their GPU if they have one"),
    VllmOption("torch_profiler_dump_cuda_time_total", (True, False), "no table is written beside the trace"),
    VllmOption("ignore_frontend", (True, False), "the caller's process is never profiled"),
    VllmOption("capture_torch_profiler", (False,), "the capture of CUDA graphs isn't profiled"),
    VllmOption("detailed_trace_annotation", (False,), "each step has only its numbers of requests and tokens"),
    VllmOption("warmup_iterations", (0,), "there is no profiler schedule (use delay_iterations)"),
    VllmOption("wait_iterations", (0,), "there is no profiler schedule (use delay_iterations)"),
    VllmOption("active_iterations", (5,), "there is no profiler schedule (use max_iterations)"),
    VllmOption("proton_profiler_dir", ("",), _ONLY_TORCH),
    VllmOption("proton_context", ("shadow",), _ONLY_TORCH),
    VllmOption("proton_data", ("tree",), _ONLY_TORCH),
    VllmOption("proton_backend", (None,), _ONLY_TORCH),
    VllmOption("proton_mode", (None,), _ONLY_TORCH),
    VllmOption("proton_hook", (None,), _ONLY_TORCH),
    VllmOption("proton_output_format", (None,), _ONLY_TORCH),
    VllmOption("proton_graph_attribution", (False,), _ONLY_TORCH),
)
"""vLLM's other settings. Values other than these are refused."""


def parse_profiler_config(value: str | dict[str, Any] | None) -> ProfilerConfig | None:
    """Convert what users pass. A configuration without `profiler` turns profiles off, and gives None.

    Raises:
        InvalidConfig: the value isn't a JSON object, or a setting is unknown, invalid or unsupported.
    """
    if value is None:
        return None
    given = without_effect("profiler_config", json_object("profiler_config", value), _WITHOUT_EFFECT)
    directory = str(given.get("torch_profiler_dir") or "")
    if given.get("profiler") is None:
        if directory:
            raise InvalidConfig(f"profiler_config: torch_profiler_dir={directory!r} needs profiler='torch'")
        return None
    if not directory or "://" in directory:
        raise InvalidConfig(
            f"profiler_config: torch_profiler_dir={directory!r} isn't a directory: name one that each node can write to"
        )
    given["torch_profiler_dir"] = os.path.abspath(Path(directory).expanduser())
    return settings_of("profiler_config", given, ProfilerConfig)
