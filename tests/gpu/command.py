"""Proves and measures raycore's GPU path, with one command: correctness first, then the times of steps.

Correctness: tokens, logits and hidden states against transformers and the CPU backend, results of pooling, images,
blocks that come back from the host, weights that are replaced, GGUF files, drafts, batch invariance, CUDA graphs, steps
that don't wait for the device, and kernels against formulas. Each check is a line that begins with ok, FAILED or
skipped; if one failed, the exit status is 1. Measurements run in any case: decodes and prompts of models with random
weights, beside what the device's memory and matrix units could do, with the time to the first token, memory, and a
profile.

On a GPU, every part runs in a process of its own, so that one that crashes, or never ends, doesn't end the others.
Checks run at the same time, measurements one after the other. What no longer fits into `--seconds` is skipped.

    python benchmarks/gpu.py --out results/gpu.md
    python benchmarks/gpu.py --device cpu --toy

Needs neither Ray nor a network. Without transformers, the comparison with it is skipped.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import logging
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TextIO

import gpu_timings
import torch
from gpu_rooflines import MODELS

from gpu import architectures, layers
from gpu.checks import (
    Checks,
    Report,
    check_engine,
    check_families,
    check_graphs,
    check_invariance,
    quiet_libraries,
)
from gpu.engines import Device
from gpu.offload import check_offload
from gpu.sampling import check_sampling
from gpu.weights import check_gguf, check_weights

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu.py"

CHECKS: dict[str, Callable[[Checks], None]] = {
    "kernels": lambda checks: _check_kernels(checks, "kernels"),
    "latents": lambda checks: _check_kernels(checks, "latents"),
    "states": lambda checks: _check_kernels(checks, "states"),
    "families": check_families,
    "engine": check_engine,
    "invariance": check_invariance,
    "graphs": check_graphs,
    "sampling": check_sampling,
    "offload": check_offload,
    "weights": check_weights,
    "GGUF": check_gguf,
    "pooling": lambda checks: _check_pooling(checks),
    "images of qwen2_5_vl": lambda checks: _check_images(checks, "qwen2_5_vl"),
    "images of qwen3_vl": lambda checks: _check_images(checks, "qwen3_vl"),
    "images of gemma3": lambda checks: _check_images(checks, "gemma3"),
    **{f"layers of {family}": functools.partial(layers.check_layers, family=family) for family in layers.NUM_BLOCKS},
    **{
        f"architectures {share}": functools.partial(architectures.check_architectures, share=share)
        for share in range(architectures.NUM_SHARES)
    },
}
MEASUREMENTS = ("embeddings", "encoders")
"""What is measured beside models' steps: embeddings of texts, and encoders of images."""
SHARE_OF_CHECKS = 0.45
"""Checks take at most this share of the time."""
MEASUREMENT_S = 60.0
"""A measurement of embeddings or encoders takes at most so long."""
GRACE_S = 20.0
"""A part is killed if it hasn't ended so long after its deadline. Importing torch is part of this time."""
SHARE_OF_MODEL = 0.5
"""A model takes at most this share of the time that is left, unless it is the last one."""


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    device: Device
    is_toy: bool
    models: list[str]
    out: Path | None
    is_isolated: bool
    deadline_s: float
    """On the clock of `time.monotonic`."""

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline_s - time.monotonic()

    def arguments(self, part: str, left_s: float) -> list[str]:
        """The command line of a process that runs one part."""
        options = ["--part", part, "--device", self.device, "--seconds", f"{left_s:.1f}"]
        return options + ["--toy"] * self.is_toy + (["--out", str(self.out)] if self.out else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    args = _parser().parse_args(arguments)
    out = Path(args.out).absolute() if args.out else None
    models = [name for name in args.models.split(",") if name]
    if unknown := set(models) - MODELS.keys():
        raise SystemExit(f"--models {','.join(sorted(unknown))}: choose from {','.join(MODELS)}")
    is_isolated = args.device == "cuda" if args.isolated is None else args.isolated
    settings = Settings(args.device, args.toy, models, out, is_isolated, time.monotonic() + args.seconds)
    quiet_libraries()
    if args.device == "cpu" and args.toy:
        torch.set_num_threads(1)  # more would only wait for each other
    if args.part is not None:
        return int(not run_part(args.part, settings, _print))
    if out is None:
        return int(not run_all(settings, _print))
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w") as file:
        return int(not run_all(settings, lambda line: _print(line, file)))


def run_all(settings: Settings, report: Report) -> bool:
    """Run all parts, and report what they report. Returns whether no check failed."""
    started_s = time.monotonic()
    run = _run_isolated if settings.is_isolated else _run_here
    checks_s = settings.left_s * SHARE_OF_CHECKS
    failed = run(["versions", *CHECKS], settings, checks_s, report)
    for part in MEASUREMENTS:
        failed += run([part], settings, min(MEASUREMENT_S, settings.left_s / 4), report)
    for index, name in enumerate(settings.models, start=1):
        share = 1.0 if index == len(settings.models) else SHARE_OF_MODEL
        failed += run([f"model:{name}"], settings, settings.left_s * share, report)
    report(f"\n{'FAILED: ' + ', '.join(failed) if failed else 'all checks are ok'}")
    report(f"{time.monotonic() - started_s:.0f} s")
    return not failed


def run_part(part: str, settings: Settings, report: Report) -> bool:
    """Run one part in this process. Returns whether no check failed."""
    handler = _LogLines(report)
    logging.getLogger("raycore").addHandler(handler)
    try:
        return _run_part(part, settings, report)
    except Exception as error:  # the device's libraries may raise anything; the other parts still run
        traceback.print_exc()
        report(f"FAILED {part}: {type(error).__name__}: {error}")
        return False
    finally:
        logging.getLogger("raycore").removeHandler(handler)


def _run_part(part: str, settings: Settings, report: Report) -> bool:
    if part == "versions":
        report_versions(settings.device, report)
    elif part in CHECKS:
        with tempfile.TemporaryDirectory(prefix="raycore_gpu_") as directory:
            checks = Checks(report, settings.device, Path(directory), settings.deadline_s)
            CHECKS[part](checks)
        return checks.num_failed == 0
    elif part in MEASUREMENTS:
        _measure(part, settings, report)
    else:
        _run_model(part.removeprefix("model:"), settings, report)
    return True


def _check_kernels(checks: Checks, part: Literal["kernels", "latents", "states"]) -> None:
    if checks.needs_gpu(part):
        return
    # these import Triton, which only GPUs need
    from gpu import kernels, latents, states

    check = {
        "kernels": kernels.check_kernels,
        "latents": latents.check_latents,
        "states": states.check_states,
    }[part]
    check(checks)


def _check_pooling(checks: Checks) -> None:
    if importlib.util.find_spec("transformers") is None:
        checks.report("skipped pooling: transformers isn't installed")
        return
    from gpu import pooling

    pooling.check_pooling(checks)


def _check_images(checks: Checks, kind: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        checks.report(f"skipped images of {kind}: transformers isn't installed")
        return
    from gpu import images

    images.check_images(checks, kind)


def _measure(part: str, settings: Settings, report: Report) -> None:
    """Measure embeddings of texts or encoders of images, whose checkpoints need transformers."""
    if importlib.util.find_spec("transformers") is None:
        report(f"skipped {part}: transformers isn't installed")
        return
    from gpu import images, pooling

    measure = pooling.measure_pooling if part == "embeddings" else images.measure_images
    measure(settings.device, settings.is_toy, report, settings.deadline_s)


def _run_model(name: str, settings: Settings, report: Report) -> None:
    scale = gpu_timings.TOY if settings.is_toy else gpu_timings.Scale()
    trace = None if settings.out is None else settings.out.with_name(f"{settings.out.stem}_{name}_trace.json")
    # the profile comes last
    deadline_s = settings.deadline_s - min(10.0, settings.left_s / 4)
    gpu_timings.measure_model(name, settings.device, scale, report, deadline_s, trace)


def report_versions(device: Device, report: Report) -> None:
    """Report the date, the device, and the versions of what computes."""
    report(f"# GPU path, {datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}\n")
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        memory = f"{properties.total_memory / 2**30:.1f} GiB, {properties.multi_processor_count} multiprocessors"
        report(f"{properties.name}, {memory}; driver {_driver()}, CUDA {torch.version.cuda}")
    else:
        report(f"CPU {platform.machine()}, {torch.get_num_threads()} threads")
    packages = ("torch", "triton", "transformers", "numpy")
    report(f"Python {platform.python_version()}, {', '.join(f'{name} {_version(name)}' for name in packages)}\n")


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class _LogLines(logging.Handler):
    """Reports raycore's warnings."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report(f"{record.levelname.lower()}: {record.getMessage()}")


# ---- parts in this process, or in their own


def _run_here(parts: list[str], settings: Settings, seconds: float, report: Report) -> list[str]:
    """Run parts one after the other. Returns those that failed."""
    limited = replace(settings, deadline_s=time.monotonic() + seconds)
    return [part for part in parts if not run_part(part, limited, report)]


def _run_isolated(parts: list[str], settings: Settings, seconds: float, report: Report) -> list[str]:
    """Run parts at the same time, each in a process of its own. Returns those that failed, crashed or never ended."""
    deadline_s = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="raycore_gpu_") as directory:
        started: list[_Process] = []
        try:
            started += [_Process(part, settings, seconds, Path(directory)) for part in parts]
            return [each.part for each in started if not each.finish(deadline_s, report)]
        finally:
            for each in started:
                each.kill()


class _Process:
    """A process that runs one part."""

    def __init__(self, part: str, settings: Settings, seconds: float, directory: Path) -> None:
        self.part = part
        name = part.replace(":", "_")
        self._output, self._errors = directory / f"{name}.out", directory / f"{name}.err"
        # leaves time to stop by itself
        arguments = settings.arguments(part, max(seconds - GRACE_S, 1.0))
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self._process = subprocess.Popen([sys.executable, str(PROGRAM), *arguments], stdout=output, stderr=errors)

    def finish(self, deadline_s: float, report: Report) -> bool:
        """Wait for the end, at most until `deadline_s`, and report the output. Returns whether the part succeeded."""
        try:
            status = self._process.wait(max(deadline_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.kill()
            status = None
        for line in self._output.read_text().splitlines():
            report(line)
        if status not in (0, 1) or (status == 1 and "FAILED" not in self._output.read_text()):
            how = "was killed at its deadline" if status is None else f"exited with status {status}"
            report(f"FAILED {self.part}: the process {how}")
        if status != 0:
            report("\n".join(["```", *self._errors.read_text().splitlines()[-30:], "```"]))
        return status == 0

    def kill(self) -> None:
        """End the process, if it hasn't ended."""
        self._process.kill()
        self._process.wait()


def _print(line: str, *files: TextIO) -> None:
    for file in (sys.stdout, *files):
        print(line, file=file, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--toy", action="store_true", help="tiny models and few steps")
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s. May be empty")
    parser.add_argument("--seconds", type=float, default=520.0, help="the whole run's limit, default: %(default)s")
    parser.add_argument("--out", metavar="FILE", help="also write the output to FILE, and profiles beside it")
    parser.add_argument(
        "--isolated",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run every part in a process of its own, default: on a GPU",
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
