"""Reads images below an allowed directory."""

from __future__ import annotations

import stat
from urllib.parse import unquote, urlsplit

from raycore.errors import InvalidRequest
from raycore.system import os


def read_file_url(url: str, root: str, max_bytes: int) -> bytes:
    """Return the content of the file that a `file:` URL names.

    Links are followed first. Then the file is opened from the allowed directory on, a folder at a time and without
    following links, so that nobody can replace a part of the path meanwhile.

    Args:
        root: the allowed directory, an absolute path without links. Empty: no file is read.

    Raises:
        InvalidRequest: the URL is invalid; there is no such regular file below `root`; or it is too large.
    """
    if not root:
        raise InvalidRequest("this server reads no files: start it with allowed_local_media_path")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidRequest(f"the URL is invalid: {error}") from None
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path or parts.query:
        raise InvalidRequest("the URL isn't one of a local file, such as file:///images/cat.png")
    try:
        resolved = os.path.realpath(path)
        folders = os.path.relpath(resolved, root).split(os.sep)
    except (OSError, ValueError):
        raise _not_there() from None
    if os.pardir in folders or os.curdir in folders:
        raise _not_there()
    return _read(root, folders, max_bytes)


def _read(root: str, folders: list[str], max_bytes: int) -> bytes:
    held: list[int] = []
    try:
        held.append(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for folder in folders[:-1]:
            held.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=held[-1]))
        # not opened to find out what it is: opening a device may do something
        if not stat.S_ISREG(os.stat(folders[-1], dir_fd=held[-1], follow_symlinks=False).st_mode):
            raise _not_there()
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        held.append(os.open(folders[-1], flags, dir_fd=held[-1]))
        found = os.fstat(held[-1])
        if not stat.S_ISREG(found.st_mode):
            raise _not_there()
        if found.st_size > max_bytes:
            raise InvalidRequest(f"the file has more than max_image_bytes={max_bytes} bytes")
        with os.fdopen(held.pop(), "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError:
        raise _not_there() from None
    finally:
        for each in held:
            os.close(each)
    if len(data) > max_bytes:
        raise InvalidRequest(f"the file has more than max_image_bytes={max_bytes} bytes")
    return data


def _not_there() -> InvalidRequest:
    # the same for all causes: it must not tell what there is elsewhere
    return InvalidRequest("there is no such file below allowed_local_media_path")
