import os
import time
from pathlib import Path

import numpy as np
import pytest

from raycore.errors import InvalidConfig
from raycore.parts.transfers.connectors.offload.files import BlockFiles, path_of

DIGEST = bytes(range(16))
SIZE = 4096


def block(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


def files_in(root: Path, max_bytes: int = 1 << 20, name: str = "w0") -> BlockFiles:
    files = BlockFiles(root, name, SIZE, max_bytes)
    files.check()
    return files


def read(files: BlockFiles, digest: bytes = DIGEST) -> np.ndarray | None:
    data = np.zeros(SIZE, np.uint8)
    # more parts than a system call takes
    parts = [part.data for part in np.split(data, 1024)]
    return data if files.read(digest, parts) else None


def test_a_block_comes_back(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    assert files.write(DIGEST, block())
    assert (read(files_in(tmp_path)) == block()).all()
    assert read(files_in(tmp_path, name="another model")) is None
    assert read(files, bytes(16)) is None


def shorten(data: bytearray) -> None:
    del data[-1:]


def lengthen(data: bytearray) -> None:
    data.append(0)


def change(data: bytearray) -> None:
    data[1000] ^= 1


def change_digest(data: bytearray) -> None:
    data[8] ^= 1


def empty(data: bytearray) -> None:
    data.clear()


@pytest.mark.parametrize("damage", [shorten, lengthen, change, change_digest, empty])
def test_a_damaged_file_is_a_miss_and_is_removed(tmp_path: Path, damage, caplog: pytest.LogCaptureFixture) -> None:
    files = files_in(tmp_path)
    files.write(DIGEST, block())
    path = files.path(DIGEST)
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    assert read(files) is None
    assert not path.exists()
    assert "are damaged" in caplog.text


def test_many_damaged_files_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = files_in(tmp_path)
    digests = [bytes([number] * 16) for number in range(20)]
    for digest in digests:
        files.write(digest, block())
        files.path(digest).write_bytes(b"x")
    assert [read(files, digest) for digest in digests] == [None] * 20
    assert caplog.text.count("are damaged") == 1


def test_the_directory_stays_below_its_limit_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    limit = 20 * (SIZE + 40)
    writers = [files_in(tmp_path, limit, f"w{index}") for index in range(2)]
    used = bytes([255] * 16)
    writers[0].write(used, block(1))
    for number in range(100):
        for writer in writers:
            writer.write(number.to_bytes(16, "big"), block(number))
        os.utime(writers[0].path(used), (time.time() + 100, time.time() + 100))
        sizes = [path.stat().st_size for path in tmp_path.rglob("*.kv")]
        assert sum(sizes) <= limit
    assert len(sizes) > 10
    assert (read(writers[0], used) == block(1)).all()


def test_a_full_disk_is_a_miss_that_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = files_in(tmp_path)

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    for _ in range(3):
        assert not files.write(DIGEST, block())
        files._paused_until_s = 0.0
    assert caplog.text.count("No space left on device") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_directory_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match=r"path='.*/file' can't be written"):
        files_in(tmp_path / "file")


def test_temporary_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    old, new = tmp_path / "w0" / "1-1.tmp", tmp_path / "w0" / "1-2.tmp"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    files.write(DIGEST, block())
    assert (old.exists(), new.exists()) == (False, True)


def test_clearing_removes_this_workers_blocks(tmp_path: Path) -> None:
    files, other = files_in(tmp_path), files_in(tmp_path, name="other")
    for each in (files, other):
        each.write(DIGEST, block())
    files.clear()
    assert read(files) is None
    assert (read(other) == block()).all()
    assert files.write(DIGEST, block())
    assert path_of(files.directory, DIGEST).exists()
