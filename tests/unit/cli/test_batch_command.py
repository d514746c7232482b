"""How `raycore run-batch` ends: its exit status, its last line, and what is in the output. The engine is replaced."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raycore.cli.main import main
from raycore.demo import demo_model_path
from raycore.errors import EngineDeadError, InvalidConfig
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.text.tokenizer import Tokenizer


class Engine:
    """Answers one request after the other. `on_request` is told how many there have been."""

    max_model_len = 64
    max_http_logprobs = 20
    pooling_spec = None
    config = SimpleNamespace(scheduler=SimpleNamespace(max_num_seqs=1), parallel=SimpleNamespace(data_parallel_size=1))
    default_sampling_params: dict[str, Any] = {}  # noqa: RUF012
    num_started = 0
    on_start: Callable[[], None] = staticmethod(lambda: None)
    on_request: Callable[[Engine, int], None] = staticmethod(lambda engine, count: None)

    def __init__(self, model: str, **options: Any) -> None:
        type(self).num_started += 1
        self.on_start()
        self.is_shut_down = False
        self.signals: list[int] = []
        self._num_requests = 0
        self._tokenizer = Tokenizer.from_dir(demo_model_path())

    @contextmanager
    def draining_on_signals(self, timeout_s: float) -> Generator[list[int], None, None]:
        before = signal.signal(signal.SIGTERM, lambda number, _: self.signals.append(number))
        yield self.signals
        signal.signal(signal.SIGTERM, before)

    def check(self, prompt, params) -> None:
        pass

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    async def ask(self, asks):
        (ask,) = asks
        self._num_requests += 1
        self.on_request(self, self._num_requests)
        reason = "abort" if self.signals else "stop"
        ids = ask.prompt.token_ids
        part = CompletionOutput(0, "x", ids, finish_reason=reason)
        yield RequestOutput(ask.request_id, None, ids, outputs=[part], finished=True)

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    fake = type("Engine", (Engine,), {})
    monkeypatch.setattr("raycore.llm.AsyncLLM", fake)
    return fake


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str], list[Any]]]:
    """Runs a batch of these ids. Gives the exit status, the lines on standard error, and the ids in the output."""

    def run(*custom_ids: str, max_tokens: int = 4, flags: tuple[str, ...] = ()) -> tuple[int, list[str], list[Any]]:
        requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        lines: list[str] = []
        for custom_id in custom_ids:
            prompt = "1 " * 5000 if custom_id.startswith("long") else "1 + 2 ="
            body = {"prompt": prompt, "max_tokens": max_tokens}
            line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
            lines.append(f"{json.dumps(line)}\n")
        requests.write_text("".join(lines))
        status = main(["run-batch", "-i", str(requests), "-o", str(results), *flags])
        ids = [json.loads(line)["custom_id"] for line in results.read_text().splitlines()] if results.exists() else []
        return status, capsys.readouterr().err.splitlines(), ids

    return run


def test_a_second_run_of_a_complete_batch_starts_no_engine(engine, run):
    status, told, ids = run("a", "b", "c")
    assert (status, ids) == (0, ["a", "b", "c"])
    assert told[-1] == "raycore: batch complete: 3 done, 0 failed, 0 skipped (already done)"
    status, told, ids = run("a", "b", "c")
    assert (status, ids) == (0, ["a", "b", "c"])
    assert told == ["raycore: batch complete: 0 done, 0 failed, 3 skipped (already done)"]
    assert engine.num_started == 1


def test_failed_batch_requests_set_exit_status_3_and_are_retried_by_the_next_run(engine, run):
    status, told, ids = run("a", "long", "b")
    assert (status, sorted(ids)) == (3, ["a", "b", "long"])
    assert told[-1] == "raycore: batch complete: 2 done, 1 failed, 0 skipped (already done)"
    status, told, ids = run("a", "long", "b")
    assert (status, ids) == (3, ["a", "b", "long"])
    assert told[-1] == "raycore: batch complete: 0 done, 1 failed, 2 skipped (already done)"


def test_a_signalled_batch_leaves_unfinished_requests_for_the_next_run(engine, run):
    def on_request(engine: Engine, count: int) -> None:
        if count == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    engine.on_request = staticmethod(on_request)
    status, told, ids = run("a", "b", "c", "d", "e", flags=("--max-concurrent-requests", "1"))
    assert (status, ids) == (143, ["a", "b"])
    counts = "2 done, 0 failed, 0 skipped (already done), 3 left; run the command again to continue"
    assert told[-1] == f"raycore: ended by SIGTERM: {counts}"
    del engine.on_request
    status, told, ids = run("a", "b", "c", "d", "e")
    assert (status, ids) == (0, ["a", "b", "c", "d", "e"])
    assert told[-1] == "raycore: batch complete: 3 done, 0 failed, 2 skipped (already done)"


def test_a_signal_during_the_engines_start_ends_the_batch_command(engine, run):
    handler = signal.getsignal(signal.SIGTERM)
    engine.on_start = staticmethod(lambda: os.kill(os.getpid(), signal.SIGTERM))
    status, told, ids = run("a", "b")
    assert (status, ids) == (143, [])
    counts = "0 done, 0 failed, 0 skipped (already done), 2 left; run the command again to continue"
    assert told[-1] == f"raycore: ended by SIGTERM: {counts}"
    assert signal.getsignal(signal.SIGTERM) == handler


def test_the_death_of_the_engine_is_printed_first_and_the_batchs_counts_last(engine, run):
    def on_request(engine: Engine, count: int) -> None:
        if count == 2:
            raise EngineDeadError("dp0 died: out of memory\nits traceback")

    engine.on_request = staticmethod(on_request)
    status, told, ids = run("a", "b", "c", flags=("--max-concurrent-requests", "1"))
    assert (status, ids) == (1, ["a"])
    assert told[-3:] == [
        "raycore: dp0 died: out of memory",
        "its traceback",
        "raycore: ended by the error above: 1 done, 0 failed, 0 skipped (already done), 2 left; "
        "run the command again to continue",
    ]


def test_a_failed_engine_start_leaves_the_batchs_output_as_it_was(engine, run):
    run("a", "long")

    def on_start() -> None:
        raise InvalidConfig("no such checkpoint")

    engine.on_start = staticmethod(on_start)
    status, told, ids = run("a", "long")
    assert (status, sorted(ids)) == (1, ["a", "long"])
    assert told == ["raycore: no such checkpoint"]


@pytest.mark.parametrize("option", ["tool-call-parser", "reasoning-parser"])
def test_an_unknown_parser_is_refused_before_an_engine_is_started(engine, run, option):
    status, told, ids = run("a", flags=(f"--{option}", "nope"))
    assert (status, ids, engine.num_started) == (1, [], 0)
    assert f"{option.replace('-', '_')}='nope' is not supported: use " in told[-1]
    assert "'qwen3" in told[-1]


def test_a_batch_whose_input_changes_during_the_run_fails(engine, run, tmp_path):
    engine.on_start = staticmethod(lambda: (tmp_path / "in.jsonl").write_text(""))
    status, told, ids = run("a", "b")
    assert (status, ids) == (1, [])
    assert told[-1].endswith("0 done, 0 failed, 0 skipped (already done), 2 left; run the command again to continue")
    assert "in.jsonl changed during the batch" in told[-1]


def test_wrong_arguments_of_run_batch_print_one_line(engine, run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for flags, message in (
        (("--max-concurrent-requests", "0"), "max_concurrent_requests=0 isn't at least 1"),
        (("--dcp-kv-cache-interleave-size", "8"), "dcp_kv_cache_interleave_size=8"),
        (("--chat-template", "/nowhere"), "/nowhere"),
        (("-i", "/nowhere"), "/nowhere can't be read"),
        (("-i", str(tmp_path / "pipe")), "pipe can't be read twice"),
    ):
        status, told, ids = run("a", flags=flags)
        assert (status, ids) == (1, [])
        assert len(told) == 1
        assert message in told[0]
