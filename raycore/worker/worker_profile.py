"""A profile of a worker's steps by torch's profiler, in which the parts of a step have names."""

# torch.autograd.profiler is partially typed:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import gzip
import logging
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

# torch.profiler's own class imports torch's compiler, which takes seconds, in which no step would run
from torch.autograd.profiler import profile, record_function

from raycore.config.profiler import ProfilerConfig, checked_prefix, session_config
from raycore.errors import InvalidInput
from raycore.messages import StepPlan
from raycore.profile_session import COMPRESSION_LEVEL, ProfileSession, RecordedParts
from raycore.runner.launched_step import LaunchedStep
from raycore.runner.runner import ModelRunner
from raycore.worker.core import NoRunner, WorkerCore
from raycore.worker.part import WorkerPart, called_by_name

logger = logging.getLogger(__name__)


class WorkerProfiler(WorkerPart):
    """Starts and ends a worker's profiles, of which at most one runs."""

    def __init__(self, core: WorkerCore) -> None:
        super().__init__(core)
        self._profile: WorkerProfile | None = None

    @called_by_name
    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start or end a profile of this worker's steps. Ending one that isn't running does nothing.

        Raises:
            InvalidInput: an argument is invalid, a profile is running, or `profiler_config` isn't set.
            OSError: the profile's file can't be written.
        """
        if not is_start:
            self._stop()
            return
        config = session_config(self.core.config.profiler_config, delay_iterations, max_iterations)
        prefix = checked_prefix(profile_prefix)
        if self._profile is None or not self._profile.is_open:
            runner = self.core.runner
            if isinstance(runner, NoRunner):
                raise InvalidInput("start_profile(): the engine is asleep, so it runs no steps: call wake_up()")
            self._profile = WorkerProfile(self.core.rank.label.replace(" ", "_"), runner)
        self._profile.start(config, prefix)

    def before_change(self) -> None:
        """Write the profile that is running, which stands between the decoder and its layers.

        A failure is only logged: it must not keep the worker from what it does next.
        """
        try:
            self._stop()
        except Exception:  # torch and the file system may raise anything
            logger.exception("the profile that was running is lost")

    def shut_down(self) -> None:
        self.before_change()

    def _stop(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()


class WorkerProfile:
    """Profiles the steps of one worker. Call its methods on the worker's thread."""

    def __init__(self, name: str, runner: ModelRunner) -> None:
        """`name`: the worker's name in file names, such as `dp0_tp0`."""
        self._runner = runner
        self._config: ProfilerConfig | None = None
        self._profiler: profile | None = None
        self._recorded: RecordedParts | None = None
        self._path = Path()
        self._session = ProfileSession(self._begin, self._end, name, "pt.trace")

    @property
    def is_open(self) -> bool:
        """Whether a profile was started and has not ended."""
        return self._session.is_open

    def start(self, config: ProfilerConfig, prefix: str | None) -> None:
        """Start a profile.

        Raises:
            InvalidInput: a profile is running.
            OSError: the file can't be created.
        """
        if not self._session.is_open:
            self._config = config
        self._session.start(config, prefix)
        self._stop_counting()  # of a profile that has ended by itself
        launch = self._runner.launch

        def counted(plan: StepPlan) -> LaunchedStep:
            self._session.next_step()
            if not self._session.is_open:
                self._stop_counting()
            if self._recorded is None:
                return launch(plan)
            with record_function(_describe(plan)):
                return launch(plan)

        self._runner.launch = counted

    def stop(self) -> Path | None:
        """End the profile. Returns the path of its file; None if no profile is running, or no step was recorded."""
        self._stop_counting()
        return self._session.stop()

    def _stop_counting(self) -> None:
        vars(self._runner).pop("launch", None)

    def _begin(self, path: Path) -> None:
        config = self._config
        assert config is not None
        self._path = path
        self._profiler = profile(
            use_device="cuda" if torch.cuda.is_available() else None,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
        )
        recorded = RecordedParts(self._runner.parts(), record_function)
        try:
            self._profiler.__enter__()
        except BaseException:
            recorded.restore()
            raise
        self._recorded = recorded

    def _end(self) -> None:
        assert self._profiler is not None
        assert self._recorded is not None
        self._recorded.restore()
        self._recorded = None
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        if self._path.suffix != ".gz":
            profiler.export_chrome_trace(str(self._path))
            return
        with tempfile.TemporaryDirectory() as directory:
            plain = Path(directory) / "trace.json"
            profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as trace, gzip.open(self._path, "wb", COMPRESSION_LEVEL) as compressed:
                shutil.copyfileobj(trace, compressed, 1 << 20)


def _describe(plan: StepPlan) -> str:
    num_requests = len(plan.slots) // 4
    num_tokens = int(np.frombuffer(plan.num_tokens, np.int32).sum()) if plan.num_tokens else num_requests
    return f"step {plan.step}: {num_requests} requests, {num_tokens} tokens"
