"""How many replicas the policy wants, and that Serve's controller can run it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from raycore.serve import QueuedTokensPolicy, queued_tokens_policy
from raycore.serve.autoscaling import QUEUED_TOKENS


def context(tokens: list[float], requests: float = 0.0, current: int | None = None, target: int = 1) -> Any:
    return SimpleNamespace(
        current_num_replicas=len(tokens) if current is None else current,
        target_num_replicas=target,
        total_num_requests=requests,
        aggregated_metrics={QUEUED_TOKENS: dict(enumerate(tokens))} if tokens else None,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 10.0),
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (context([0]), 0),
        (context([50]), 0.5),
        (context([250, 50]), 3),
        (context([0, 0, 0], requests=25), 2.5),  # streams whose prompts are computed
        (context([100], requests=25), 2.5),
        (context([], current=1), 0),  # nothing reported yet
        (context([], current=0, target=2), 2),
    ],
)
def test_replicas_follow_queued_tokens_and_requests(given, wanted):
    assert QueuedTokensPolicy(target_tokens=100)(given) == (wanted, {})


def test_a_target_that_is_no_positive_number_is_refused():
    for target in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="target_tokens="):
            queued_tokens_policy(target)


def test_serves_controller_needs_nothing_of_raycore_to_run_it():
    from ray.serve.config import AutoscalingPolicy

    policy = AutoscalingPolicy(**queued_tokens_policy(100))
    script = (
        "import pickle, sys; from types import SimpleNamespace as S\n"
        "sys.modules['raycore'] = None\n"
        "policy = pickle.loads(sys.stdin.buffer.read())(**eval(sys.argv[1]))\n"
        "context = S(current_num_replicas=1, total_num_requests=0, aggregated_metrics=eval(sys.argv[2]),"
        " config=S(get_target_ongoing_requests=lambda: 1))\n"
        "print(policy(context)[0])\n"
    )
    arguments = [repr(policy.policy_kwargs), repr({QUEUED_TOKENS: {"a": 250.0}})]
    definition = policy.get_serialized_policy_def()
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], input=definition, capture_output=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.returncode) == (b"2.5", 0), done.stderr.decode()
    assert pickle.loads(definition).__name__ == QueuedTokensPolicy.__name__
