"""The process that checks constraints: it may die of one, and nobody else notices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from waiting import LONG_S, eventually

from raycore.demo import demo_model_path
from raycore.errors import EngineDeadError, InvalidRequest
from raycore.node.processes import is_running, wait_until_gone
from raycore.parts.constraints.grammar.gate import CompileLimits, ConstraintGate
from raycore.structured_outputs import StructuredOutputsParams

STAND_IN = ("stand_in_compiler", "checker")
LIMITS = CompileLimits(cpu_s=1, wall_s=30, memory_bytes=64 << 20)


def do(action: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=action)


@pytest.fixture
def gate():
    gate = ConstraintGate("", 8, [0], limits=LIMITS, checker=STAND_IN)
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def real_gate():
    gate = ConstraintGate(demo_model_path(), 352, [0, 3])
    yield gate
    gate.close()


def pid_of(gate: ConstraintGate) -> int:
    assert gate._process is not None
    return gate._process.pid


def refused(error: type[Exception], gate: ConstraintGate, asked: StructuredOutputsParams) -> None:
    with pytest.raises(error):
        gate.check(asked)


def wait_for_pid(path: Path) -> int:
    eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


NUMBERS = '{"type":"integer","minimum":-100000000000000000000,"maximum":-10000000000000000000}'
LEAST = '{"type":"integer","minimum":-9223372036854775808,"maximum":-9223372036854775808}'


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"json": NUMBERS}, r"#/minimum: minimum=-100000000000000000000 can't be held exactly"),
        ({"json": LEAST}, r"#/minimum: minimum=-9223372036854775808 can't be held exactly"),
        ({"grammar": f"start: %json {LEAST}"}, r"#/minimum: minimum=-9223372036854775808 can't be held exactly"),
        ({"json": "[1"}, r"structured_outputs\.json='\[1': the schema isn't valid JSON"),
        ({"regex": "["}, r"structured_outputs\.regex='\[': .*unclosed character class"),
        ({"regex": "(" * 50_000 + ")" * 50_000}, "invalid regex"),
        ({"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000}, "too deeply nested"),
    ],
)
def test_constraints_that_the_compiler_rejects_are_refused_with_the_reason(real_gate, asked, reason):
    with pytest.raises(InvalidRequest, match=f"(?s){reason}"):
        real_gate.check(StructuredOutputsParams(**asked))
    real_gate.check(StructuredOutputsParams(regex="a"))


def test_a_crash_of_the_real_compiler_is_a_refusal():
    """A stack that is too small for what the compiler is given."""
    gate = ConstraintGate(demo_model_path(), 352, [0, 3], limits=CompileLimits(stack_bytes=128 << 10))
    schema: dict = {"type": "integer"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidRequest, match=r"compiler ended by SIG(SEGV|ABRT|BUS): simplify the constraint"):
        gate.check(StructuredOutputsParams(json=schema))
    gate.check(StructuredOutputsParams(regex="a"))
    gate.close()


def test_a_constraint_that_would_fail_at_a_later_token_is_refused_beforehand(real_gate):
    """A row of the parser holds 2,000 items at most; this one comes after the first token."""
    alternatives = " | ".join(f'"a" r{i}' for i in range(3000))
    rules = "\n".join(f'r{i}: "{i}"' for i in range(3000))
    with pytest.raises(InvalidRequest, match=r"can't be enforced at token 1 of an output: .* max is 2000"):
        real_gate.check(StructuredOutputsParams(grammar=f"start: {alternatives}\n{rules}"))


def test_large_constraints_are_checked_within_the_time_limit(real_gate):
    properties = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{3,{i % 90 + 4}}}$"} for i in range(3500)}
    asked = StructuredOutputsParams(json={"type": "object", "properties": properties, "required": [*properties]})
    real_gate.check(asked)
    assert real_gate.knows(asked)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("crash", "the constraint's compiler ended by SIGSEGV: simplify the constraint"),
        ("spin", "compiling the constraint takes more than 1 s of a processor: simplify it"),
        ("allocate 1000000000", "compiling the constraint takes more than 64 MiB of memory: simplify it"),
        ("run-short", "compiling the constraint takes more than 64 MiB of memory: simplify it"),
        ("kill-itself", "the constraint's compiler ended by SIGKILL"),
        ("refuse for a reason", "for a reason"),
        ("raise", "the constraint's compiler raised IndexError: list index out of range"),
    ],
)
def test_a_constraint_that_crashes_or_exhausts_its_check_affects_no_other(gate, action, reason):
    gate.check(do("pass"))
    pid = pid_of(gate)
    with pytest.raises(InvalidRequest, match=rf"structured_outputs\.regex='{action}': {reason}"):
        gate.check(do(action))
    gate.check(do("pass 2"))
    assert pid_of(gate) == pid, "only forks of the process die"


def test_a_constraint_that_waits_for_its_check_has_a_time_limit():
    gate = ConstraintGate("", 8, [0], limits=CompileLimits(wall_s=1), checker=STAND_IN)
    with pytest.raises(InvalidRequest, match="took longer than 1 s: simplify it, or try again"):
        gate.check(do("sleep 60"))
    assert not gate.knows(do("sleep 60")), "another time it may be quicker"
    gate.close()


def test_a_slow_constraint_delays_no_other(gate, tmp_path):
    slow = threading.Thread(target=refused, args=[InvalidRequest, gate, do(f"touch-and-sleep {tmp_path}/pid")])
    slow.start()
    wait_for_pid(tmp_path / "pid")
    gate.check(do("pass"))
    assert slow.is_alive()
    os.kill(wait_for_pid(tmp_path / "pid"), signal.SIGKILL)
    slow.join(LONG_S)
    assert not slow.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a process has computed")
def test_a_slow_constraint_yields_the_cores(tmp_path):
    gate = ConstraintGate("", 8, [0], limits=CompileLimits(cpu_s=100), checker=STAND_IN)
    slow = threading.Thread(target=refused, args=[EngineDeadError, gate, do(f"touch-and-spin {tmp_path}/pid")])
    slow.start()
    pid = wait_for_pid(tmp_path / "pid")
    eventually(lambda: os.getpriority(os.PRIO_PROCESS, pid) != os.getpriority(os.PRIO_PROCESS, pid_of(gate)))
    gate.close()
    slow.join(LONG_S)


def test_a_constraint_is_checked_once(gate, tmp_path):
    threads = [threading.Thread(target=gate.check, args=[do(f"touch {tmp_path}/pid")]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    gate.check(do(f"touch {tmp_path}/pid"))
    assert len((tmp_path / "pid").read_text().split()) == 1
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no"):
            gate.check(do("refuse no"))
    assert gate.knows(do("refuse no"))


def test_several_constraints_are_checked_together_and_the_first_refusal_is_raised(gate):
    gate.check_all([do("pass"), do("pass 2"), do("pass")])
    with pytest.raises(InvalidRequest, match="no"):
        gate.check_all([do("pass"), do("pass 3"), do("refuse no")])
    with pytest.raises(InvalidRequest, match="no"):
        gate.check_all([do("refuse no")])


def test_a_checking_process_that_ends_is_replaced(gate, tmp_path):
    gate.check(do("pass"))
    pid = pid_of(gate)
    gate.check(do(f"kill-parent {tmp_path}/pid"))
    assert pid_of(gate) != pid
    os.kill(pid_of(gate), signal.SIGKILL)
    gate.check(do("pass 2"))


def test_constraints_are_refused_if_the_checking_process_cannot_start():
    gate = ConstraintGate("deadly", 8, [0], checker=STAND_IN)
    with pytest.raises(InvalidRequest, match="compiler failed twice"):
        gate.check(do("pass"))
    gate.close()


def test_the_checking_process_does_not_start_before_the_first_constraint(gate):
    assert not gate.knows(do("pass"))
    assert gate._process is None


def test_the_checking_process_imports_neither_torch_nor_ray(gate):
    gate.check(do("imports torch ray"))


def test_closing_the_gate_ends_its_process_and_its_checks(gate, tmp_path):
    slow = threading.Thread(target=refused, args=[EngineDeadError, gate, do(f"touch-and-sleep {tmp_path}/pid")])
    slow.start()
    pids = [wait_for_pid(tmp_path / "pid"), pid_of(gate)]
    gate.close()
    slow.join(LONG_S)
    assert wait_until_gone(pids, 30) == []
    with pytest.raises(EngineDeadError, match="shut down"):
        gate.check(do("pass"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_checking_process_ends_when_its_owner_dies(tmp_path, number):
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from raycore.parts.constraints.grammar.gate import ConstraintGate\n"
        "from raycore.structured_outputs import StructuredOutputsParams\n"
        f"gate = ConstraintGate('', 8, [0], checker={STAND_IN!r})\n"
        "gate.check(StructuredOutputsParams(regex='pass'))\n"
        "print(gate._process.pid, flush=True)\n"
        f"gate.check(StructuredOutputsParams(regex='touch-and-sleep {tmp_path}/pid'))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(owner.stdout.readline()), wait_for_pid(tmp_path / "pid")]
        assert all(map(is_running, pids))
        owner.send_signal(number)
        owner.wait(LONG_S)
    assert wait_until_gone(pids, 30) == []
