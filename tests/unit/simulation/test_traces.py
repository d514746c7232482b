"""Traces of requests: what is read from each format, and what is said of lines that are wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from raycore.node.logs import DATE_FORMAT, line_format
from raycore.simulation.deployment import Prompts
from raycore.simulation.traces import BLOCK_TOKENS, InvalidTrace, TracedRequest, faster, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def mooncake(**fields: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 10, "output_length": 2, **fields}) + "\n"


def test_mooncake_traces_have_milliseconds_and_numbers_of_blocks(tmp_path: Path):
    lines = mooncake(timestamp=3500, input_length=600, hash_ids=[7, 8]) + "\n" + mooncake(timestamp=2000)
    assert read_trace(written(tmp_path, lines)) == [
        TracedRequest(0.0, 10, 2),
        TracedRequest(1.5, 600, 2, (7, 8)),
    ]


def test_azure_traces_have_times_with_seven_digits(tmp_path: Path):
    lines = AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.6805900,396,109\n"
    first, second = read_trace(written(tmp_path, lines))
    assert (first.num_prompt, first.num_output, second.num_prompt, second.num_output) == (374, 44, 396, 109)
    assert second.arrival_s == pytest.approx(1.0)
    zones = AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 01:00:00.5+00:00,2399,6\n"
    assert read_trace(written(tmp_path, zones))[1].arrival_s == pytest.approx(3600.49007)


def test_logs_of_requests_have_whole_seconds_which_their_requests_divide(tmp_path: Path):
    formatter = logging.Formatter(line_format(), DATE_FORMAT)

    def line(second: int, message: str) -> str:
        record = logging.LogRecord("raycore.server.request_log", logging.INFO, "", 0, message, (), None)
        record.created = 1_700_000_000 + second
        return formatter.format(record) + "\n"

    lines = [
        "INFO 11-14 22:13:20 raycore.server.app [pid 1] listening\n",
        line(0, "request a: 5 prompt tokens, SamplingParams(n=1), adapter None"),
        line(0, "request b: 6 prompt tokens, SamplingParams(n=2), adapter None"),
        line(1, "request a: output 0 of 12 tokens ' text', finish reason stop"),
        line(4, "request c: 7 prompt tokens, SamplingParams(n=1), adapter None"),
        line(5, "request b: part 0 of 1 tokens ' x', finish reason None"),
        line(5, "request b: output 0 of 3 tokens ' x', finish reason stop"),
        line(5, "request b: output 1 of 4 tokens ' y', finish reason stop"),
        line(6, "request c: output 0 of 9 tokens ' z', finish reason abort"),
    ]
    assert read_trace(written(tmp_path, "".join(lines))) == [
        TracedRequest(0.0, 5, 12),
        TracedRequest(0.5, 6, 7),
        TracedRequest(4.0, 7, 9),
    ]
    with pytest.raises(InvalidTrace, match=r"line 2: the log says nothing of the output's length: .*--enable-log-out"):
        read_trace(written(tmp_path, "".join(lines[:2])))
    old = line(0, "request a: SamplingParams(n=1), adapter None")
    with pytest.raises(InvalidTrace, match=r"line 1: the log says nothing of the prompt's length"):
        read_trace(written(tmp_path, old))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("no trace\n", "has no requests in the format 'raycore'"),
        (mooncake() + "{broken\n", r"line 2: '{broken' isn't JSON"),
        (mooncake() + "[1]\n", r"line 2: '\[1\]' isn't an object"),
        (mooncake(timestamp="x"), "line 1: timestamp='x' isn't a number"),
        (mooncake(timestamp=float("nan")), "line 1: timestamp=nan isn't a number"),
        (mooncake(input_length=0), "line 1: input_length=0 isn't a positive integer"),
        (mooncake(output_length=2.5), "line 1: output_length=2.5 isn't a positive integer"),
        (mooncake(output_length=True), "line 1: output_length=True isn't a positive integer"),
        (mooncake(hash_ids=[1, "a"]), r"line 1: hash_ids=\[1, 'a'\] isn't a list of numbers"),
        (mooncake(hash_ids=[1], input_length=513), "line 1: hash_ids has 1 blocks of 512 tokens, less than"),
        ('{"timestamp": 1, "input_length": 3}\n', "line 1: there is no output_length, only timestamp, input_length"),
        (AZURE + "2023-11-16 18:15:46.68,374\n", "line 2: 2 columns instead of 3"),
        (AZURE + "yesterday,374,44\n", "line 2: TIMESTAMP='yesterday' isn't a time"),
        (AZURE + "2023-11-16 18:15:46.68,many,44\n", "line 2: ContextTokens='many' isn't a positive integer"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "line 1: there is no column 'GeneratedTokens', only TIMESTAMP, Cont"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, message: str):
    with pytest.raises(InvalidTrace, match=message):
        read_trace(written(tmp_path, text))


def test_files_that_cant_be_read_are_named(tmp_path: Path):
    with pytest.raises(InvalidTrace, match=r"absent can't be read: No such file"):
        read_trace(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidTrace, match=r"isn't UTF-8"):
        read_trace(tmp_path / "binary")


def test_prompts_are_equal_as_far_as_their_blocks_are():
    prompts = Prompts(vocab_size=50)
    one = prompts.tokens(0, TracedRequest(0.0, 1400, 1, (3, 70_000, 5)))
    other = prompts.tokens(1, TracedRequest(0.0, 1300, 1, (3, 70_000, 6)))
    assert len(one) == 1400
    assert len(other) == 1300
    assert one[: 2 * BLOCK_TOKENS] == other[: 2 * BLOCK_TOKENS]
    assert one[2 * BLOCK_TOKENS : 2 * BLOCK_TOKENS + 16] != other[2 * BLOCK_TOKENS : 2 * BLOCK_TOKENS + 16]
    assert max(one) < 50
    plain = [prompts.tokens(index, TracedRequest(0.0, 40, 1)) for index in range(3000)]
    assert len({tuple(tokens[:16]) for tokens in plain}) == 3000


def test_requests_may_come_faster():
    assert faster([TracedRequest(3.0, 1, 1, (1,))], 2.0) == [TracedRequest(1.5, 1, 1, (1,))]
