"""Sends random JSON schemas as constraints, and checks that nothing breaks and that every output is valid.

Each schema takes the way of a request: it is checked as at admission, in a process that may die. What is accepted is
compiled and followed as in a worker, with random tokens instead of a model's, which go where a model seldom goes. Every
output that comes to its end is validated with `jsonschema`, numbers exactly and formats included. The last schemas are
also sent to a real server, which `raycore serve` starts with the bundled model.

    python -m tests.fuzz.constraints --count 10000 --http 500
"""

from __future__ import annotations

import argparse
import collections
import decimal
import functools
import itertools
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from typing import Any, NamedTuple

import httpx
import numpy as np

from fuzz.schemas import hypothesis_schemas, own_schemas
from raycore.demo import demo_model_path
from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.parts.constraints.grammar.gate import MAX_AT_ONCE, CompileLimits, ConstraintGate
from raycore.structured_outputs import StructuredOutputsParams

VOCAB_SIZE, EOS = 320, [0, 3]
NUM_WALKS = 4
MAX_TOKENS = 400
SHOWN = 5
FAILURES = ("invalid", "stuck", "crashed")
START_TIMEOUT_S = 120.0
_ENDED = re.compile(r"compiler (ended|raised)|panic")


class Outcome(NamedTuple):
    """What became of one schema."""

    schema: str
    kind: str
    """`accepted`, `refused`, `invalid` (an output isn't valid), `stuck` (accepted, but can't be followed), or
    `crashed` (the compiler ended on it)."""
    detail: str
    num_outputs: int
    duration_s: float


class Fuzz:
    """Checks and follows constraints."""

    def __init__(self) -> None:
        model = (str(demo_model_path()), VOCAB_SIZE, EOS)
        self._gate = ConstraintGate(*model)
        # the second check stands for a worker: more of everything than the first
        limits = CompileLimits(cpu_s=60, wall_s=300, memory_bytes=4 << 30, stack_bytes=16 << 20)
        self._worker = ConstraintGate(*model, limits=limits, checker=("fuzz.constraints", "follower"))

    def close(self) -> None:
        self._gate.close()
        self._worker.close()

    def run(self, schema: str) -> Outcome:
        """What becomes of one schema."""
        started_s = time.monotonic()
        kind, detail, num_outputs = "accepted", "", 0
        asked = StructuredOutputsParams(json=schema)
        try:
            self._gate.check(asked)
            duration_s = time.monotonic() - started_s
        except InvalidRequest as error:
            detail = str(error).removeprefix(f"{asked}: ")
            kind = "crashed" if _ENDED.search(detail) else "refused"
            return Outcome(schema, kind, detail, 0, time.monotonic() - started_s)
        try:
            self._worker.check(asked)
        except InvalidRequest as error:
            kind, detail = "stuck", str(error).removeprefix(f"{asked}: ")
            with suppress(ValueError):
                kind, detail, num_outputs = json.loads(detail)
        return Outcome(schema, kind, detail, num_outputs, duration_s)


def follower(tokenizer_dir: str, vocab_size: int, eos: Sequence[int]) -> Callable[[StructuredOutputsParams], None]:
    """A check for `ConstraintGate` that follows a constraint as a worker does.

    It always raises InvalidRequest, because its message, the outcome as JSON, is all that a fork returns.
    """
    import jsonschema  # noqa: F401  # once, and not in each fork

    from raycore.text.tokenizer import Tokenizer

    compiler = GrammarCompiler(tokenizer_dir, vocab_size, eos)
    compiler._native.load()  # before the forks, which start the threads
    tokenizer = Tokenizer.from_dir(tokenizer_dir)

    def follow(asked: StructuredOutputsParams) -> None:
        schema = str(asked.json)
        compiler.begin(asked).result()  # a busy machine may take longer than a step waits
        validate = validator(schema)
        outputs = [text for seed in range(NUM_WALKS) if (text := _walk(compiler, tokenizer, asked, seed)) is not None]
        for text in outputs:
            problem = validate(text)
            if problem:
                raise InvalidRequest(json.dumps(["invalid", f"{problem}: {text[:300]}", len(outputs)]))
        raise InvalidRequest(json.dumps(["accepted", "", len(outputs)]))

    return follow


def _walk(compiler: GrammarCompiler, tokenizer: Any, asked: StructuredOutputsParams, seed: int) -> str | None:
    """A random output; None if it hasn't come to its end within `MAX_TOKENS` tokens."""
    rng = random.Random(seed)
    matcher, ids = compiler.matcher(asked), []
    closing = {tokenizer.encode(text, add_special_tokens=False)[0] for text in '"}],:'}
    while len(ids) < MAX_TOKENS:
        allowed = np.flatnonzero(matcher.allowed_after(np.array(ids, np.int32))).tolist()
        ends = [token_id for token_id in allowed if token_id in EOS]
        if ends and (len(allowed) == len(ends) or rng.random() < 0.3):
            return tokenizer.decode(ids, skip_special_tokens=False)
        allowed = [token_id for token_id in allowed if token_id not in EOS]
        preferred = [token_id for token_id in allowed if token_id in closing]
        ids.append(rng.choice(preferred if preferred and rng.random() < 0.4 else allowed))
    return None


def validator(schema: str) -> Callable[[str], str | None]:
    """A function that tells what is wrong with an output, or None."""
    import jsonschema
    from jsonschema.validators import extend

    def pattern(_: Any, value: str, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
        # ECMAScript's classes are ASCII's
        if isinstance(instance, str) and not re.search(value, instance, re.ASCII):
            yield jsonschema.ValidationError(f"{instance!r} does not match {value!r}")

    parsed = json.loads(schema, parse_float=Decimal)
    cls = jsonschema.validators.validator_for(parsed, jsonschema.Draft202012Validator)
    checks = extend(cls, {"pattern": pattern})(parsed, format_checker=cls.FORMAT_CHECKER)
    decimal.getcontext().prec = 10_000  # for integers with thousands of digits

    def validate(text: str) -> str | None:
        try:
            instance = json.loads(text, parse_float=_number)
        except ValueError as error:
            return f"not JSON: {error}"
        try:
            problem = next(checks.iter_errors(instance), None)
        except (RecursionError, re.error, decimal.InvalidOperation):
            return None  # references in a circle, a pattern that is none, or a number beyond what Decimal divides
        return None if problem is None else f"{problem.message[:200]} at {problem.json_path}"

    return validate


def _number(text: str) -> Decimal:
    """A number of an output, exactly, unless its exponent is astronomical."""
    try:
        return Decimal(text)
    except decimal.InvalidOperation:
        is_small = "-" in text.lower().partition("e")[2]
        return Decimal(0) if is_small else Decimal("-Infinity" if text.startswith("-") else "Infinity")


def schemas(count: int, seed: int) -> Iterator[str]:
    """Four of five from a generator of our own, the others from hypothesis-jsonschema."""
    yield from itertools.islice(own_schemas(seed), count - count // 5)
    yield from hypothesis_schemas(seed, count // 5)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts by kind, reasons of refusals, and the slowest checks in seconds."""
    kinds = collections.Counter(outcome.kind for outcome in outcomes)
    reasons = collections.Counter(_kind_of(outcome.detail) for outcome in outcomes if outcome.kind == "refused")
    return {
        "kinds": dict(kinds),
        "valid outputs": sum(outcome.num_outputs for outcome in outcomes if outcome.kind == "accepted"),
        "refused because": dict(reasons.most_common(25)),
        "slowest checks, s": [
            (round(outcome.duration_s, 3), outcome.schema[:200], outcome.detail[:80])
            for outcome in sorted(outcomes, key=lambda outcome: -outcome.duration_s)[:SHOWN]
        ],
        "failures": [outcome._asdict() for outcome in outcomes if outcome.kind in FAILURES][:20],
    }


def _is_good(answer: str) -> bool:
    return answer in ("400", "200, valid", "200, cut off")


def _kind_of(reason: str) -> str:
    reason = re.sub(r"^#\S*: ", "", reason)
    return re.sub(r"(=|: )?['\"/(\[{].*|-?\d[\d.e+-]*", "…", reason.split("\n")[0])[:60]


def run(count: int, seed: int, progress: Callable[[Outcome], None] = lambda _: None) -> list[Outcome]:
    """Check and follow `count` schemas. `progress` is called with each outcome, in any order."""
    fuzz = Fuzz()

    def run_one(schema: str) -> Outcome:
        outcome = fuzz.run(schema)
        progress(outcome)
        return outcome

    try:
        with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
            return list(threads.map(run_one, schemas(count, seed)))
    finally:
        fuzz.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="how many schemas are checked and followed")
    parser.add_argument("--http", type=int, default=100, help="how many of them are also sent to a server")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    counted = itertools.count(1)

    def progress(outcome: Outcome) -> None:
        if outcome.kind in FAILURES:
            print(json.dumps(outcome._asdict()), file=sys.stderr, flush=True)
        if (done := next(counted)) % 500 == 0:
            print(f"{done} schemas", file=sys.stderr, flush=True)

    outcomes = run(options.count, options.seed, progress)
    print(json.dumps(summary(outcomes), indent=2, ensure_ascii=False))
    failed = any(outcome.kind in ("invalid", "stuck") for outcome in outcomes)  # a crash is what the check is for
    if options.http:
        served = random.Random(options.seed).sample(outcomes, min(options.http, len(outcomes)))
        result = serve_and_send([outcome.schema for outcome in served])
        print(json.dumps(result, indent=2))
        failed = failed or not result["alive"] or any(not _is_good(answer) for answer in result["answers"])
    return int(failed)


def serve_and_send(sent: Sequence[str]) -> dict[str, Any]:
    """Send schemas, a few at a time, to a server of the bundled model. Returns counts of what came back."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "raycore", "serve", "--port", str(port), "--max-model-len", "512"]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                _wait_until_ready(client, server)
                with ThreadPoolExecutor(4) as threads:
                    counts = collections.Counter(threads.map(functools.partial(_send, client), sent))
                alive = client.post("/v1/completions", json={"prompt": "27 + 58 =", "max_tokens": 1}).status_code == 200
        finally:
            server.terminate()
            server.wait(60)
        log.seek(0)
        num_tracebacks = log.read().count(b"Traceback")
    return {"answers": dict(counts), "alive": alive, "tracebacks in the log": num_tracebacks}


def _wait_until_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline_s:
        with suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError("the server didn't start")


def _send(client: httpx.Client, schema: str) -> str:
    """What came back for one schema."""
    body = {"prompt": "27 + 58 =", "max_tokens": 60, "temperature": 1.5, "structured_outputs": {"json": schema}}
    response = client.post("/v1/completions", json=body)
    if response.status_code != 200:
        return str(response.status_code)
    (choice,) = response.json()["choices"]
    if choice["finish_reason"] != "stop":
        return "200, cut off"
    problem = validator(schema)(choice["text"])
    if problem:
        print(f"invalid: {schema}: {problem}: {choice['text']}", file=sys.stderr)
    return "200, invalid" if problem else "200, valid"


if __name__ == "__main__":
    sys.exit(main())
