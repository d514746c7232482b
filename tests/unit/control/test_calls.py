"""Each call is declared once: what it asks of whom, how replies become one result, and who offers it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from raycore import LLM, AsyncLLM
from raycore.client.client import UTILITY_TIMEOUT_S
from raycore.config import resolve
from raycore.control.calls import CALL_NAMES, REMOTE_CALLS, RPC_GRACE_S, AsyncCalls, EngineCalls
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig, InvalidInput

Asked = tuple[str, tuple[Any, ...], float, int | None]


class Engine:
    """A client, a supervisor, pauses and adapters that only take notes."""

    def __init__(self, replies: list[Any] | None = None, **options: Any) -> None:
        self.replies = replies or []
        self.asked: list[Any] = []
        self.stale: list[Any] = []
        others = SimpleNamespace(
            scale=self._note("scale"),
            watches=lambda: {0: None},
            activity=SimpleNamespace(is_paused=True),
            pause=self._note("pause"),
            resume=self._note("resume"),
            wake_up=self._note("wake_up"),
            add=self._note("add"),
            remove=self._note("remove"),
            pin=self._note("pin"),
            ids=self._note("ids"),
            check_can_change=lambda call: None,
            stale_ranks=lambda: self.stale,
        )
        config = resolve(demo_model_path(), **options)
        parts = SimpleNamespace(
            client=self, clients=self, supervisor=others, pauses=others, adapters=others, weights=others, config=config
        )
        self.calls = EngineCalls(parts)  # pyright: ignore[reportArgumentType]

    def utility(
        self,
        method: str,
        args: tuple[Any, ...],
        timeout_s: float = UTILITY_TIMEOUT_S,
        num_ranks: int | None = None,
        others: Sequence[Any] = (),
    ) -> list[Any]:
        assert others is (self.stale if method == "collective_rpc" else ())
        self.asked.append((method, args, timeout_s, num_ranks))
        return self.replies

    def forget_images(self) -> None:
        self.asked.append("forget_images")

    def _note(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.asked.append((name, args, kwargs))


def test_every_call_is_a_documented_method_of_both_classes():
    for name in CALL_NAMES:
        call, made = getattr(EngineCalls, name), getattr(AsyncCalls, name, None)
        assert made is not None, f"AsyncCalls has no {name}"
        assert getattr(LLM, name) is call
        assert getattr(AsyncLLM, name) is made
        assert inspect.getdoc(call)
        assert inspect.getdoc(made) == inspect.getdoc(call)
        assert inspect.signature(made) == inspect.signature(call)
        assert inspect.iscoroutinefunction(made)


def test_every_remote_call_is_a_call_of_the_engine():
    assert REMOTE_CALLS < CALL_NAMES
    assert {name for name in vars(AsyncCalls) if not name.startswith("_")} == CALL_NAMES


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        (lambda calls: calls.check_health(), ("check_health", (), UTILITY_TIMEOUT_S, None)),
        (lambda calls: calls.stop_profile(), ("profile", (False,), UTILITY_TIMEOUT_S, None)),
        (
            lambda calls: calls.start_profile("run", max_iterations=3),
            ("profile", (True, "run", None, 3), UTILITY_TIMEOUT_S, None),
        ),
        (
            lambda calls: calls.collective_rpc("ping", 3.0),
            ("collective_rpc", ("ping", 3.0, (), {}), 3.0 + RPC_GRACE_S, None),
        ),
        (lambda calls: calls.scale(3, 4.0), ("scale", (3, 4.0), {})),
        (lambda calls: calls.pause_generation(mode="keep"), ("pause", ("keep", True), {})),
        (lambda calls: calls.sleep(2, "wait"), ("pause", ("wait",), {"clear_cache": True, "sleep_level": 2})),
        (lambda calls: calls.sleep(0), ("pause", ("abort",), {"clear_cache": False, "sleep_level": 0})),
        (lambda calls: calls.wake_up(["weights"]), ("wake_up", (["weights"], True), {})),
        (lambda calls: calls.wake_up(reads_weights=False), ("wake_up", (None, False), {})),
        (lambda calls: calls.resume_generation(), ("resume", (), {})),
        (lambda calls: calls.remove_lora(4), ("remove", (4,), {})),
        (lambda calls: calls.pin_lora(4), ("pin", (4,), {})),
        (lambda calls: calls.list_loras(), ("ids", (), {})),
    ],
)
def test_each_call_asks_ranks_and_the_driver_as_listed(call: Callable[[EngineCalls], object], asked: Asked):
    engine = Engine()
    call(engine.calls)
    assert engine.asked == [asked]


def test_the_caches_of_images_are_dropped_in_all_clients_and_on_all_ranks():
    engine = Engine()
    engine.calls.reset_mm_cache()
    engine.calls.reset_encoder_cache()
    later = [(name, (), UTILITY_TIMEOUT_S, None) for name in ("reset_mm_cache", "reset_encoder_cache")]
    assert engine.asked == ["forget_images", *later]


def test_the_replies_of_ranks_are_combined_to_one_result():
    assert Engine([["a", "b"], ["c"]]).calls.collective_rpc("name") == ["a", "b", "c"]
    assert Engine([True, True]).calls.reset_prefix_cache() is True
    assert Engine([True, False]).calls.reset_prefix_cache() is False
    assert Engine().calls.is_paused() is True


@pytest.mark.parametrize(("level", "says"), [(3, "level=3 isn't 0, 1 or 2"), (-1, "level=-1 isn't 0, 1 or 2")])
def test_an_unknown_level_of_sleep_is_refused(level: int, says: str):
    engine = Engine()
    with pytest.raises(InvalidInput, match=says):
        engine.calls.sleep(level)
    assert engine.asked == []


def test_save_sharded_state_is_asked_of_one_rank(tmp_path):
    engine = Engine()
    engine.calls.save_sharded_state(tmp_path / "x", max_size=5)
    ((method, args, _, num_ranks),) = engine.asked
    assert (method, num_ranks) == ("save_sharded_state", 1)
    assert args[0] == str(tmp_path / "x")
    assert args[2] == 5
    with pytest.raises(InvalidConfig, match="pattern"):
        engine.calls.save_sharded_state(tmp_path, pattern="weights.safetensors")


@pytest.mark.parametrize("seconds", [-1.0, 1e300, float("inf"), float("nan")])
def test_nobody_waits_for_times_that_nothing_can_wait_for(seconds: float):
    engine = Engine()
    for name, call in (("timeout", engine.calls.collective_rpc), ("drain_timeout_s", engine.calls.scale)):
        with pytest.raises(InvalidInput, match=re.escape(f"{name}={seconds} isn't between 0 and 1e+09 seconds")):
            call(2, seconds)  # pyright: ignore[reportArgumentType]
    assert engine.asked == []
