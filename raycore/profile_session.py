"""What the profiles of engines and of workers have in common: a session, and parts whose calls are recorded.

While no profile is recorded, nothing of this runs: parts of a step are replaced by ones that record their calls when a
profile begins, and put back when it ends. Does not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from raycore.config.profiler import ProfilerConfig
from raycore.errors import InvalidInput

logger = logging.getLogger(__name__)

COMPRESSION_LEVEL = 6
"""gzip's level for traces. Level 9 takes four times as long, for a file that is a seventh smaller."""

Record = Callable[[str], AbstractContextManager[Any]]
"""Returns a context manager that records the time of its body under a name."""

ProfiledParts = Iterable[tuple[object, Mapping[str, str]]]
"""Objects, each with those of its attributes that compute a part of a step: the part's name by the attribute's name."""


class ProfileSession:
    """One profile at a time. It begins after some steps, and ends by itself after some more or when it is stopped."""

    def __init__(self, begin: Callable[[Path], None], end: Callable[[], None], name: str, kind: str) -> None:
        """
        Args:
            begin: starts to record. The argument is the file to write.
            end: stops to record, and writes the file.
            name: the name of the process in file names.
            kind: see `ProfilerConfig.trace_path`.
        """
        self._begin = begin
        self._end = end
        self._name = name
        self._kind = kind
        self._config: ProfilerConfig | None = None
        self._path: Path | None = None
        self._num_steps = 0
        self._is_recording = False

    @property
    def is_open(self) -> bool:
        """Whether a profile was started and has not ended, even if recording has not begun."""
        return self._config is not None

    def start(self, config: ProfilerConfig, prefix: str | None) -> None:
        """Start a profile: it begins at once, or when `next_step()` has been called `delay_iterations` times.

        Raises:
            InvalidInput: a profile is running.
            OSError: the file can't be created.
        """
        if self.is_open:
            raise InvalidInput("a profile is running: end it with stop_profile() before you start another one")
        self._path = config.trace_path(self._name, prefix, self._kind)
        self._path.touch(exist_ok=False)  # now, while someone waits for the error
        self._config, self._num_steps = config, 0
        if config.delay_iterations:
            return
        try:
            self._begin_recording()
        except BaseException:
            self.stop()
            raise

    def next_step(self) -> None:
        """Note that a step begins. Never raises: what goes wrong with the profile must not fail the step."""
        config = self._config
        if config is None:
            return
        self._num_steps += 1
        num_recorded = self._num_steps - config.delay_iterations
        try:
            if config.delay_iterations and num_recorded == 1:
                self._begin_recording()
            elif config.max_iterations and num_recorded > config.max_iterations:
                self.stop()
        except Exception:  # torch and the file system may raise anything
            logger.exception("the profile %s failed", self._path)
            self._config = None

    def stop(self) -> Path | None:
        """End the profile and write its file. Returns the file's path, or None if no step was recorded.

        Does nothing and returns None if no profile is running, for example in a rank that has replaced another one.
        """
        config, self._config = self._config, None
        if config is None or self._path is None:
            return None
        if not self._is_recording:
            self._path.unlink(missing_ok=True)
            return None
        self._is_recording = False
        self._end()
        logger.info("wrote the profile %s", self._path)
        return self._path

    def _begin_recording(self) -> None:
        assert self._path is not None
        self._begin(self._path)
        self._is_recording = True


class RecordedParts:
    """Parts of a step that have been replaced by ones that record their calls."""

    def __init__(self, parts: ProfiledParts, record: Record) -> None:
        """Replace the parts: all, or none if one can't be replaced."""
        self._undo: list[Callable[[], None]] = []
        try:
            for owner, names in parts:
                for attribute, name in names.items():
                    self._replace(owner, attribute, _Recorded(getattr(owner, attribute), name, record))
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Put the parts back."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: object, attribute: str, part: _Recorded) -> None:
        if attribute in vars(owner):
            original = getattr(owner, attribute)
            setattr(owner, attribute, part)
            self._undo.append(lambda: setattr(owner, attribute, original))
        else:  # a method of the class
            setattr(owner, attribute, part)
            self._undo.append(lambda: delattr(owner, attribute))


class _Recorded:
    """Stands for a part of a step. Records the calls of the part, and of its method `add_to`."""

    def __init__(self, part: Any, name: str, record: Record) -> None:
        self._part = part
        self._name = name
        self._record = record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._record(self._name):
            return self._part(*args, **kwargs)

    def add_to(self, *args: Any) -> Any:
        with self._record(self._name):
            return self._part.add_to(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)
