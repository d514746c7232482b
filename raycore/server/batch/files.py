"""A batch's files: one with the requests and one with their results, both with one JSON object per line.

A new run with the same files continues the batch. Each result is completely written before the next one, so a crash can
leave at most the last line incomplete. The next run removes an incomplete line.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import msgspec

from raycore.errors import InvalidInput
from raycore.plain_errors import decode_problem
from raycore.server.http.json_text import to_json

logger = logging.getLogger(__name__)

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions that decoding raises for bytes that are not JSON, or not JSON of the expected type."""

_MAX_NAMED = 5
"""How many duplicate ids an error lists."""

_RESULT_PREFIX = b'{"id":"batch_req_'


@dataclass(frozen=True)
class RequestLine:
    """A line of the request file."""

    number: int
    """The line's number, counted from 1."""
    text: bytes
    custom_id: str | None
    """None if the line isn't JSON or has no custom_id."""


class Response(msgspec.Struct):
    """The response that the HTTP server would have sent for the request."""

    status_code: int
    request_id: str
    body: Any


class Result(msgspec.Struct):
    """A line of the result file. `error` is null if and only if the request succeeded."""

    id: str
    custom_id: str | None
    response: Response | None
    error: dict[str, Any] | None


class RequestFile:
    """The file with the requests. The constructor reads it once, for the custom_ids. `lines` reads it again."""

    def __init__(self, path: Path) -> None:
        """Read the custom_ids. Raises InvalidInput if the file can't be read or a custom_id occurs twice."""
        self._path = path
        self.num_lines = 0
        """Number of lines that aren't blank."""
        self.line_numbers: dict[str, int] = {}
        """The line number of each custom_id."""
        repeated: list[str] = []
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise InvalidInput(f"{path} can't be read twice, because it isn't a regular file")
            for line in self._read():
                self.num_lines += 1
                if line.custom_id is None:
                    continue
                first = self.line_numbers.setdefault(line.custom_id, line.number)
                if first != line.number:
                    repeated.append(f"{line.custom_id!r} on lines {first} and {line.number}")
        except OSError as error:
            raise InvalidInput(f"{path} can't be read: {error.strerror}") from error
        if repeated:
            more = f", and {len(repeated) - _MAX_NAMED} more" if len(repeated) > _MAX_NAMED else ""
            raise InvalidInput(f"{path}: custom_ids aren't unique: {', '.join(repeated[:_MAX_NAMED])}{more}")

    def lines(self, done: Container[str | None]) -> Iterator[RequestLine]:
        """The lines that aren't blank, in order, except those whose custom_id is in `done`."""
        return (line for line in self._read() if line.custom_id not in done)

    def _read(self) -> Iterator[RequestLine]:
        with self._path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield RequestLine(number, text, _custom_id(text))


class ResultFile:
    """The file with the results. The constructor opens, locks and reads it. Only `begin()` and `append()` change it."""

    def __init__(self, path: Path, line_numbers: Mapping[str, int]) -> None:
        """Open, lock and read the file.

        Args:
            line_numbers: `RequestFile.line_numbers` of the batch.

        Raises:
            InvalidInput: the file can't be opened, another process is writing it, or its lines aren't results of this
                batch.
        """
        self.path = path.resolve()
        self.done: set[str] = set()
        """The custom_ids of requests that have succeeded."""
        self._has_failures = False
        self._size = 0
        """Size of the complete lines, in bytes."""
        self._fd = _open_locked(self.path)
        try:
            self._scan(line_numbers)
        except BaseException:
            os.close(self._fd)
            raise

    def begin(self) -> None:
        """Prepare the file for new results. Removes an incomplete last line, and the results of failed requests, which
        are tried again."""
        if self._has_failures:
            self._rewrite()
        else:
            os.ftruncate(self._fd, self._size)

    def append(self, result: Result) -> None:
        """Append a result. If that fails, raises OSError, which names the file."""
        line = memoryview(to_json(result) + b"\n")
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def _scan(self, line_numbers: Mapping[str, int]) -> None:
        with open(self._fd, "rb", closefd=False) as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    if not _begins_like_a_result(text):
                        raise InvalidInput(
                            f"{self.path}, line {number}, isn't a result of a batch; is it the right file?"
                        )
                    return
                self._note(number, text, line_numbers)
                self._size += len(text)

    def _note(self, number: int, text: bytes, line_numbers: Mapping[str, int]) -> None:
        try:
            result = _decode_result(text)
        except NOT_JSON as error:
            problem = decode_problem(error)
            raise InvalidInput(
                f"{self.path}, line {number}, isn't a result of a batch ({problem}); is it the right file?"
            ) from error
        if not _is_done(result):
            self._has_failures = True
            return
        assert result.custom_id is not None
        if result.custom_id not in line_numbers:
            raise InvalidInput(
                f"{self.path}, line {number}, is the result of {result.custom_id!r}, which isn't in the input; "
                "use a separate output file for each input"
            )
        if result.custom_id in self.done:
            raise InvalidInput(f"{self.path}, line {number}, is a second result of {result.custom_id!r}; remove one")
        self.done.add(result.custom_id)

    def _rewrite(self) -> None:
        """Atomically replace the file with one that has only the results of successful requests."""
        new_path = self.path.with_name(f"{self.path.name}.tmp")
        new_path.unlink(missing_ok=True)
        new = _open_locked(new_path)
        try:
            os.fchmod(new, stat.S_IMODE(os.fstat(self._fd).st_mode))
            with open(self._fd, "rb", closefd=False) as source, open(new, "ab", closefd=False) as target:
                source.seek(0)
                target.writelines(text for text in source if text.endswith(b"\n") and _is_done(_decode_result(text)))
                target.flush()
                os.fsync(new)
            new_path.replace(self.path)
        except BaseException:
            os.close(new)
            raise
        os.close(self._fd)
        self._fd = new


class _Id(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1)]


class _Outcome(msgspec.Struct):
    """The fields of a `Result` that say which request it belongs to, and whether the request succeeded."""

    id: str
    custom_id: str | None
    error: Any


_decode_id = msgspec.json.Decoder(_Id).decode
_decode_result = msgspec.json.Decoder(_Outcome).decode


def _custom_id(text: bytes) -> str | None:
    try:
        return _decode_id(text).custom_id
    except NOT_JSON:
        return None


def _is_done(result: _Outcome) -> bool:
    return result.error is None and result.custom_id is not None


def _begins_like_a_result(text: bytes) -> bool:
    return text.startswith(_RESULT_PREFIX[: len(text)])


def _open_locked(path: Path) -> int:
    """Open a file for appending, and lock it against other processes that use this function."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        advice = ": make its directory first" if isinstance(error, FileNotFoundError) else ""
        raise InvalidInput(f"{path} can't be opened for writing: {error.strerror}{advice}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidInput(f"{path} isn't a regular file, so a run couldn't continue from it")
        _lock(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(fd: int, path: Path) -> None:
    taken = InvalidInput(f"{path}: another process is writing to it; wait for it to end, or use another output file")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise taken from error
    except OSError as error:
        logger.warning("%s can't be locked (%s); make sure that no other run writes to it", path, error.strerror)
    if not os.path.samestat(os.fstat(fd), path.stat()):
        raise taken  # the process that held the lock has replaced the file
