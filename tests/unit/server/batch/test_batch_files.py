"""What a batch's output holds after runs that were ended at any point, and whose files are not what they should be."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import pytest

from raycore.errors import InvalidInput
from raycore.server.batch.files import RequestFile, Response, Result, ResultFile


def write_requests(path: Path, *custom_ids: str) -> RequestFile:
    path.write_text("".join(json.dumps({"custom_id": custom_id}) + "\n" for custom_id in custom_ids))
    return RequestFile(path)


def answered(custom_id: str) -> Result:
    return Result("batch_req_1", custom_id, Response(200, "req_1", {"text": "ünï\n"}), None)


def failed(custom_id: str | None) -> Result:
    return Result("batch_req_2", custom_id, None, {"code": "x", "message": "y"})


def append(path: Path, requests: RequestFile, *results: Result) -> None:
    with ResultFile(path, requests.line_numbers) as file:
        file.begin()
        for result in results:
            file.append(result)


def ids_in(path: Path) -> list[str | None]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


@pytest.fixture
def requests(tmp_path) -> RequestFile:
    return write_requests(tmp_path / "in.jsonl", "a", "b", "c", "d")


def test_input_lines_are_numbered_as_in_editors_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b'\n{"custom_id":"a"}\r\n   \n{"custom_id":7}\nnot JSON\n{"custom_id":""}\n{"custom_id":"\xff"}\n'
        + b"[" * 100_000
        + b'\n{"url":"x","custom_id":"b"}'
    )
    requests = RequestFile(path)
    assert requests.num_lines == 7
    assert requests.line_numbers == {"a": 2, "b": 9}
    assert [(line.number, line.custom_id) for line in requests.lines({"a"})] == [
        *[(4, None), (5, None), (6, None), (7, None), (8, None), (9, "b")]
    ]


def test_a_custom_id_on_several_lines_is_refused_with_the_lines(tmp_path):
    with pytest.raises(InvalidInput, match=r"'a' on lines 1 and 3, 'b' on lines 2 and 4, 'a' on lines 1 and 5$"):
        write_requests(tmp_path / "in.jsonl", "a", "b", "a", "b", "a")
    with pytest.raises(InvalidInput, match=r"lines 1 and 6, and 2 more$"):
        write_requests(tmp_path / "in.jsonl", *["a"] * 8)


def test_an_input_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(InvalidInput, match=f"{path} can't be read"):
            RequestFile(path)


def test_an_output_can_be_cut_off_anywhere_and_no_result_is_lost_or_repeated(tmp_path, requests):
    path = tmp_path / "out.jsonl"
    append(path, requests, answered("a"), answered("b"), answered("c"))
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with ResultFile(path, requests.line_numbers) as file:
            num_whole = whole[:size].count(b"\n")
            assert file.done == set("abc"[:num_whole])
            assert path.stat().st_size == size, "nothing is changed before the run begins"
            file.begin()
            for custom_id in "abcd"[num_whole:]:
                file.append(answered(custom_id))
        assert ids_in(path) == ["a", "b", "c", "d"]


def test_failed_results_are_dropped_for_a_retry_and_done_ones_stay_byte_for_byte(tmp_path, requests):
    path = tmp_path / "link.jsonl"
    target = tmp_path / "out.jsonl"
    path.symlink_to(target)
    append(path, requests, failed("a"), answered("b"), failed(None), answered("c"))
    target.chmod(0o640)
    lines = path.read_bytes().splitlines(keepends=True)
    with path.open("ab") as file:
        file.write(lines[0][:-5])
    with ResultFile(path, requests.line_numbers) as file:
        assert file.done == {"b", "c"}
        file.begin()
        assert target.read_bytes() == lines[1] + lines[3]
        file.append(answered("a"))
    assert ids_in(target) == ["b", "c", "a"]
    assert path.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "link.jsonl", "out.jsonl"]


def test_a_second_run_with_the_same_output_file_is_refused(tmp_path, requests):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, requests.line_numbers) as first:
        first.begin()
        first.append(failed("a"))
        with pytest.raises(InvalidInput, match="another process is writing to it"):
            ResultFile(path, requests.line_numbers)
    with ResultFile(path, requests.line_numbers) as second:
        second.begin()  # a file of its own now has the name
        with pytest.raises(InvalidInput, match="another process is writing to it"):
            ResultFile(path, requests.line_numbers)
    append(path, requests, answered("a"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("notes of somebody's\n", "line 1, isn't a result"),
        ("notes of somebody's", "line 1, isn't a result"),
        ('{"id":"x","custom_id":"a","error":null}\n{"custom_id":"b"}\n', "line 2, isn't a result"),
        ('{"id":"x","custom_id":"z","error":null}\n', "line 1, is the result of 'z', which isn't in the input"),
        ('{"id":"x","custom_id":"a","error":null}\n' * 2, "line 2, is a second result of 'a'"),
    ],
)
def test_a_file_that_is_not_this_batchs_output_is_left_alone(tmp_path, requests, content, message):
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidInput, match=message):
        ResultFile(path, requests.line_numbers)
    assert path.read_text() == content


def test_an_output_file_that_cannot_be_opened_is_named(tmp_path, requests):
    for path, why in (
        (tmp_path / "nowhere" / "out.jsonl", "No such file"),
        (tmp_path, "Is a directory"),
        (Path("/dev/null"), "isn't a regular file"),
    ):
        with pytest.raises(InvalidInput, match=why) as raised:
            ResultFile(path, requests.line_numbers)
        assert str(path) in str(raised.value)


def test_a_full_disk_is_named_and_partial_writes_are_finished(tmp_path, requests, monkeypatch):
    path = tmp_path / "out.jsonl"
    real_write = os.write
    rng = random.Random(0)
    with ResultFile(path, requests.line_numbers) as file:
        file.begin()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data: real_write(fd, data[: rng.randint(1, 9)]))
            file.append(answered("a"))

        def full(fd: int, data: memoryview) -> int:
            real_write(fd, data[:7])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match=r"No space left on device: '.*out\.jsonl'"):
                file.append(answered("b"))
    append(path, requests, answered("b"))
    assert ids_in(path) == ["a", "b"]
