"""Lets a seed tell the same story wherever this project lies, and whenever it was put there.

Paths are in messages, whose sizes are told, and simulated weights follow from the path of the checkpoint. So the world
has paths of its own, and files with the same content at two of them are those of different weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from raycore import kernels, same_copy
from raycore.demo import demo_model_path
from raycore.parts.transfers.connectors import identity

_COPY: same_copy.Copy = ("/raycore", "1", "the same sources", "the same files")
_KERNELS = Path("/raycore/kernels")
_DESCRIPTOR = 250
"""Of the open directory with the bundled model. Few processes have so many open files."""
MODEL = f"/proc/self/fd/{_DESCRIPTOR}/{Path(demo_model_path()).name}"
"""The checkpoint's path."""
_content = identity._content


def _of_path(file: Path, size: int, apart: int) -> bytes:
    return _content(file, size, apart) + bytes(file)


@contextmanager
def same_paths() -> Iterator[None]:
    """Within the block, there is a checkpoint at `MODEL`, and raycore is a copy that lies elsewhere."""
    opened = os.open(Path(demo_model_path()).parent, os.O_RDONLY | os.O_DIRECTORY)
    os.dup2(opened, _DESCRIPTOR, inheritable=False)
    os.close(opened)
    try:
        with (
            mock.patch.object(same_copy, "_own", _COPY),
            mock.patch.object(kernels, "FOLDER", _KERNELS),
            mock.patch.object(identity, "_content", _of_path),
        ):
            yield
    finally:
        os.close(_DESCRIPTOR)
