"""Runs the cases of a kind of model against a server, and prints a line of JSON for each.

python -m client_cases KIND ROOT MODEL KEY TOKENIZER
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
import warnings

from client_cases.cases import CASES, MARK, Case, Server, quiet

MODULES = {
    "openai": "with_openai",
    "anthropic": "with_anthropic",
    "litellm": "with_litellm",
    "langchain-openai": "with_langchain",
    "instructor": "with_instructor",
    "dspy": "with_dspy",
    "outlines": "with_outlines",
    "lm-eval": "with_lm_eval",
}
"""By library: the module with its cases."""


def main() -> None:
    """Run the cases."""
    kind, *server = sys.argv[1:]
    quiet()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for library, module in MODULES.items():
        try:
            importlib.import_module(f"client_cases.{module}")
        except ImportError as error:
            tell(library, "import", f"missing: {error}", 0.0)
    for case in CASES:
        if kind in case.kinds:
            began = time.monotonic()
            tell(case.library, case.name, outcome(case, Server(*server)), time.monotonic() - began)


def outcome(case: Case, server: Server) -> str:
    """`ok`, or what went wrong."""
    try:
        case.run(server)
    except Exception as error:  # whatever a library raises is the result
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return "ok"


def tell(library: str, name: str, result: str, duration_s: float) -> None:
    """Print a result."""
    print(MARK + json.dumps([library, name, result, duration_s]), flush=True)


if __name__ == "__main__":
    main()
