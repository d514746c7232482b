"""Sends the requests of the scenario table to raycore and vLLM, and lists where their answers differ.

Both serve the bundled model in float32, with an API key: as a model that generates, as one of embeddings and as one of
scores. The table explains the known differences. The exit status is 1 if a difference has no explanation, or if
raycore's answer is not the one in the table. vLLM takes a minute or more to start, each time.

    python benchmarks/openai_compatibility.py --peer-python PEER/bin/python
"""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from common import table
from openai_scenarios import SCENARIOS, Api
from openai_servers import MAX_MODEL_LEN, MODELS, PEER_FLAGS, raycore_server, vllm_server

from raycore import AsyncLLM
from raycore.demo import demo_model_path

WIDTH = 110


def main() -> int:
    """Run the benchmark and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer-python", metavar="PATH", help="the interpreter that has vLLM; without it only raycore runs"
    )
    parser.add_argument("--start-timeout-s", type=float, default=600.0, help="for vLLM's server")
    args = parser.parse_args()
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] | None = {} if args.peer_python else None
    for of in MODELS:
        ours |= _ask_raycore(of)
        if theirs is not None:
            with vllm_server(args.peer_python, args.start_timeout_s, of, options=PEER_FLAGS.get(of)) as api:
                theirs |= _ask(api, of)
    return _report(ours, theirs)


def _ask_raycore(of: str) -> dict[str, Any]:
    engine = AsyncLLM(demo_model_path(), max_model_len=MAX_MODEL_LEN, dtype="float32", **MODELS[of])
    try:
        with raycore_server(engine) as api:
            return _ask(api, of)
    finally:
        engine.shutdown()


def _ask(api: Api, of: str) -> dict[str, Any]:
    """The outcome of each scenario of a kind of model, or its error."""
    outcomes: dict[str, Any] = {}
    for row in (each for each in SCENARIOS if each.of == of):
        try:
            outcomes[row.name] = row.ask(api)
        except Exception as error:  # the answer has an unexpected form
            outcomes[row.name] = f"{type(error).__name__}: {error}"
    return outcomes


def _report(ours: dict[str, Any], theirs: dict[str, Any] | None) -> int:
    wrong = [row for row in SCENARIOS if ours[row.name] != row.expected]
    for row in wrong:
        print(f"\n{row.name}: raycore's answer is not the one in the table")
        _print_field("table", row.expected)
        _print_field("raycore", ours[row.name])
    counts = {"scenarios": len(SCENARIOS), "raycore as in the table": len(SCENARIOS) - len(wrong)}
    unexplained = 0
    if theirs is not None:
        differing = [row for row in SCENARIOS if ours[row.name] != theirs[row.name]]
        unexplained = sum(row.vllm_differs is None for row in differing)
        for row in differing:
            print(f"\n{row.name}")
            _print_field("raycore", ours[row.name])
            _print_field("vLLM", theirs[row.name])
            _print_field("why", row.vllm_differs or "UNEXPLAINED")
        for row in SCENARIOS:
            if row.vllm_differs is not None and row not in differing:
                print(f"\n{row.name}: the table explains a difference, but the answers are the same")
        counts |= {
            "raycore and vLLM equal": len(SCENARIOS) - len(differing),
            "different, explained": len(differing) - unexplained,
            "different, unexplained": unexplained,
        }
    print("\n" + table([("", "rows"), *counts.items()]))
    return 1 if wrong or unexplained else 0


def _print_field(name: str, value: Any) -> None:
    print(textwrap.fill(str(value), WIDTH, initial_indent=f"  {name:8} ", subsequent_indent=" " * 11))


if __name__ == "__main__":
    raise SystemExit(main())
