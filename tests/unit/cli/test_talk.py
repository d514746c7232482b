"""`raycore chat` and `raycore complete` with a real server of an engine that isn't one."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest
from fake_engine import FakeEngine

from raycore.cli.api_client import ApiClient, ServerRefused
from raycore.cli.main import main
from raycore.errors import InvalidConfig
from raycore.server import ServerOptions, build_app
from raycore.server.process.listening import listen
from raycore.server.process.serving import HttpServer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=120)


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Generator[str, None, None]:
    options = ServerOptions(("fake", "other"), api_keys=("k",), chat_template=TEMPLATE)
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(build_app(engine, options), listener)
        server.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.stop()


@pytest.fixture
def talk(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command with what is written to it. Returns its status and what it printed."""

    def run(*arguments: str, stdin: str = "", key: str | None = "k") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        keys = [] if key is None else ["--api-key", key]
        status = main([*arguments, "--url", url, *keys])
        return status, *capsys.readouterr()

    return run


def prompts_of(engine: FakeEngine, start: int) -> list[str]:
    return [engine.tokenizer.decode_batch([ids])[0] for ids in engine.asked[start:]]


def test_a_quick_answer_is_all_that_is_printed(talk: Any) -> None:
    assert talk("complete", "-q", "27 + 58 =") == (0, " 85 is the answer\n", "")
    assert talk("chat", "--quick", "27 + 58?", "--max-tokens", "3")[1] == " 85\n"


def test_a_conversation_has_the_earlier_messages_and_the_system_prompt(talk: Any, engine: FakeEngine) -> None:
    start = len(engine.asked)
    status, out, err = talk("chat", "--system-prompt", "Be brief.", "--stats", stdin="one?\n\ntwo?\n")
    assert (status, out) == (0, " 85 is the answer\n" * 2)
    assert err.startswith("Using model: fake\n[time to first token ")
    assert "tokens/s]" in err
    first, second = prompts_of(engine, start)
    assert first.endswith("<system>Be brief.<user>one?")
    assert second.endswith("<user>one?<assistant> 85 is the answer<user>two?")


def test_an_error_ends_the_answer_and_not_the_conversation(talk: Any, engine: FakeEngine) -> None:
    start = len(engine.asked)
    status, out, err = talk("chat", "--model-name", "other", stdin=f"{'long ' * 200}\ntwo?\n")
    assert (status, out) == (0, "\n 85 is the answer\n")
    assert "status 400: " in err
    assert prompts_of(engine, start)[-1].endswith("<user>two?")
    assert "long" not in prompts_of(engine, start)[-1]


def test_errors_of_a_quick_answer_set_the_status(talk: Any) -> None:
    assert talk("chat", "-q", "a", key="wrong")[0] == 1
    status, _, err = talk("complete", "-q", "a", "--model-name", "none-such")
    assert status == 1
    assert err.startswith("raycore: http://127.0.0.1:")
    assert "none-such" in err


def test_the_key_may_be_in_the_environment(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("RAYCORE_API_KEY", "k")
    assert talk("complete", "-q", "a", key=None)[0] == 0


def test_a_url_that_is_none_and_a_server_that_is_gone_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="--url localhost:8000: give the URL"):
        ApiClient("localhost:8000")
    with pytest.raises(ServerRefused, match=r"can't be reached .*refused.*raycore serve"):
        ApiClient("http://127.0.0.1:9/v1").first_model()


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation(url: str, engine: FakeEngine) -> None:
    begun, release = threading.Event(), threading.Event()

    async def wait(index: int) -> None:
        import asyncio

        if index == 2:
            begun.set()
            while not release.is_set():
                await asyncio.sleep(0.01)

    own, terminal = pty.openpty()
    num_aborted = len(engine.aborted)
    engine.at_token = lambda index: wait(index)
    command = [sys.executable, "-m", "raycore", "complete", "--url", url, "--api-key", "k"]
    seen = b""
    streams: dict[str, Any] = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    # jobs in the background of a shell ignore Ctrl-C, and so do their children
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **streams, preexec_fn=default) as process:

        def read_until(text: bytes, count: int = 1) -> None:
            nonlocal seen
            while seen.count(text) < count:
                seen += os.read(own, 1000)

        try:
            os.close(terminal)
            read_until(b"> ")
            os.write(own, b"27 + 58 =\n")
            assert begun.wait(30)
            process.send_signal(signal.SIGINT)
            read_until(b"> ", 2)
            engine.at_token = lambda index: None
            release.set()
            os.write(own, b"again\n")
            read_until(b"is the answer")
            read_until(b"> ", 3)
            os.write(own, b"\x04")
            assert process.wait(20) == 0
        finally:
            process.kill()
    os.close(own)
    assert len(engine.aborted) == num_aborted + 1
