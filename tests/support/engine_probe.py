"""What the tests of running engines observe beyond the interface of `LLM` and `AsyncLLM`.

Those tests read no private attributes of an engine. What can't be observed otherwise is read here.
"""

from __future__ import annotations

from ray.exceptions import RayError
from waiting import eventually

from raycore import LLM, AsyncLLM
from raycore.control.commands import ACTOR_PREFIX, NAMESPACE
from raycore.control.remote import RemoteEngine
from raycore.errors import ControlError
from raycore.ray_api import find_actor, get

_ANSWER_TIMEOUT_S = 5.0


def wait_until_reachable(llm: LLM | AsyncLLM) -> None:
    """Wait until other processes of the cluster can control the engine, and see that its ranks are up."""
    reason = ""

    def is_reachable() -> bool:
        nonlocal reason
        try:
            status, _ = RemoteEngine(llm.name).status()
        except ControlError as error:
            reason = str(error)
            return False
        reason = str(status)
        return bool(status.ranks) and all(rank.state != "starting" for rank in status.ranks)

    eventually(is_reachable, lambda: f"engine {llm.name} can't be reached: {reason}")


def control_pid(name: str) -> int | None:
    """The process id of an engine's control actor; None if there is no such actor, or it doesn't answer."""
    try:
        return get(find_actor(f"{ACTOR_PREFIX}{name}", NAMESPACE).pid.remote(), timeout_s=_ANSWER_TIMEOUT_S)
    except (ValueError, RayError):
        return None


def standby_pids(llm: LLM | AsyncLLM) -> list[int]:
    """The process ids of the engine's standbys that wait on this node; empty while none is ready."""
    standbys = llm._manager._standbys
    return [pid for standby in list(standbys._ready.values()) for pid in standby._pids]
