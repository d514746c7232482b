"""What clients ask of an OpenAI-compatible server, with what raycore answers: a table for a test and a benchmark.

Each row is a function that asks, and gives what came back as plain values without ids and times, so that it can be
compared: with what is expected here, and with what another server answers for the same checkpoint, the bundled one.
Where vLLM answers otherwise, the row says why.
"""

from openai_scenarios import chat, choosing, completions, errors, surroundings
from openai_scenarios.table import SCENARIOS, Api, Scenario

__all__ = ["SCENARIOS", "Api", "Scenario", "chat", "choosing", "completions", "errors", "surroundings"]
