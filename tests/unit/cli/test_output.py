"""What is said of output that can't be written."""

from __future__ import annotations

import errno
import re
import sys
from pathlib import Path

import pytest

from raycore.cli.output import is_full, save, unwritten
from raycore.errors import RaycoreError


def test_a_file_is_written_with_its_folder(tmp_path: Path):
    save(tmp_path / "a" / "b.json", "{}")
    assert (tmp_path / "a" / "b.json").read_text() == "{}"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_a_full_disk_is_named_with_what_it_has():
    with pytest.raises(RaycoreError, match=r"^/dev/full can't be written: No space left on device: .* MiB are free$"):
        save(Path("/dev/full"), "{}")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "a").touch()
    with pytest.raises(RaycoreError, match=rf"^{re.escape(str(tmp_path))}/a/b\.json can't be written: "):
        save(tmp_path / "a" / "b.json", "{}")


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EDQUOT, "full"), True),
        (OSError(errno.EFBIG, "full"), True),
        (OSError(errno.ENOENT, "gone"), False),
        (BrokenPipeError(errno.EPIPE, "pipe"), False),
        (OSError("no number"), False),
    ],
)
def test_which_errors_mean_that_there_is_no_room(error: OSError, is_told: bool):
    assert is_full(error) is is_told


def test_the_file_of_an_error_is_named(tmp_path: Path):
    text = unwritten(OSError(errno.ENOSPC, "No space left", str(tmp_path)))
    assert text.startswith(f"{tmp_path} can't be written: No space left: ")
    assert unwritten(OSError(errno.ENOSPC, "No space left")) == "the output can't be written: No space left"
