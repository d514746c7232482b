"""What the log says of requests to the model, and of their outputs."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from fake_engine import FakeEngine

from raycore.errors import InvalidConfig, RaycoreError
from raycore.server.log_options import LogOptions
from raycore.server.options import server_options

ALL = LogOptions(enable_log_requests=True, enable_log_outputs=True)


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    found = [each.getMessage() for each in caplog.records if each.name == "raycore.server.request_log"]
    assert all(each.startswith("request cmpl-mine: ") for each in found)
    return [each.removeprefix("request cmpl-mine: ") for each in found]


@pytest.fixture(autouse=True)
def captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "raycore.server.request_log")


def test_requests_are_logged_only_if_asked_for(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    serve().complete({}, request_id="mine")
    assert lines(caplog) == []
    serve(log=LogOptions(enable_log_requests=True)).complete({}, request_id="mine", temperature=0.25)
    (line,) = lines(caplog)
    assert re.match(r"\d+ prompt tokens, SamplingParams\(", line)
    assert "temperature=0.25" in line
    assert line.endswith(", adapter None")


def test_prompts_are_logged_at_level_debug(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "raycore.server.request_log")
    log = LogOptions(enable_log_requests=True, max_log_len=4)
    serve(log=log).complete({}, request_id="mine")
    assert lines(caplog)[1].startswith("prompt '27 +', token ids [")
    assert lines(caplog)[1].count(",") == 4  # between two parts, and between four ids


def test_outputs_are_logged_whole_and_in_the_parts_of_streams(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    serve(log=ALL).complete({}, request_id="mine")
    (line,) = lines(caplog)[1:]
    assert re.fullmatch(r"output 0 of \d+ tokens ' 85 is the answer', finish reason stop", line)
    caplog.clear()
    serve(log=ALL).complete({}, request_id="mine", stream=True)
    found = lines(caplog)[1:]
    parts = [each.split("'")[1] for each in found[:-1]]
    assert len(parts) > 2
    assert "".join(parts) == " 85 is the answer"
    assert found[-1] == line
    caplog.clear()
    whole = LogOptions(enable_log_requests=True, enable_log_outputs=True, enable_log_deltas=False, max_log_len=3)
    serve(log=whole).complete({}, request_id="mine", stream=True)
    assert lines(caplog)[1:] == [line.replace(" is the answer", "")]


@pytest.mark.parametrize("path", ["complete", "chat"])
def test_beam_searches_are_logged_with_all_their_sequences(
    serve: Any, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level(logging.DEBUG, "raycore.server.request_log")
    answer = getattr(serve(log=ALL), path)({}, use_beam_search=True, n=2, max_tokens=100)
    told = [each.getMessage() for each in caplog.records if each.name == "raycore.server.request_log"]
    asked, prompt, *outputs = [each.removeprefix(f"request {answer.json['id']}: ") for each in told]
    assert re.match(r"\d+ prompt tokens, BeamSearchParams\(beam_width=2, max_tokens=100", asked)
    assert prompt.startswith("prompt '")
    for index, output in enumerate(outputs[::2]):
        assert re.fullmatch(rf"output {index} of \d+ tokens ' 85 is the answer', finish reason stop", output)
    assert all(each.startswith(f"output {index}, token ids [") for index, each in enumerate(outputs[1::2]))


def test_a_beam_search_without_a_limit_is_logged_with_that_of_the_engine(
    serve: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    serve(log=ALL).chat({}, use_beam_search=True, n=2)
    told = [each.getMessage() for each in caplog.records if each.name == "raycore.server.request_log"]
    assert f"max_tokens={engine.max_model_len}," in told[0]


def test_what_was_generated_before_a_failure_is_logged(
    serve: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(index: int) -> None:
        if index == 2:
            raise RaycoreError("no luck")

    engine.at_token = fail
    serve(log=ALL).complete({}, request_id="mine", stream=True)
    assert lines(caplog)[-1].endswith("finish reason abort")


def test_outputs_need_requests() -> None:
    with pytest.raises(InvalidConfig, match=r"enable_log_outputs .* needs enable_log_requests"):
        server_options("m", {"enable_log_outputs": True})
