"""A table of requests to an OpenAI-compatible server with raycore's answers, for a test and a benchmark.

Each scenario is a function that sends requests and returns the answers as plain values, without ids and times. They are
compared with the expected values in the table, and with another server's answers for the bundled model. If vLLM's
answer differs, the scenario has the reason.
"""

from openai_scenarios import (
    batched,
    chat,
    choosing,
    completions,
    errors,
    fields,
    messages,
    pooling,
    responses,
    surroundings,
)
from openai_scenarios.table import SCENARIOS, Api, Scenario

__all__ = [
    "SCENARIOS",
    "Api",
    "Scenario",
    "batched",
    "chat",
    "choosing",
    "completions",
    "errors",
    "fields",
    "messages",
    "pooling",
    "responses",
    "surroundings",
]
