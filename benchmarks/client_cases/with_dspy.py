"""DSPy, which writes prompts for signatures."""

from __future__ import annotations

from typing import Any, Literal

import dspy

from client_cases.cases import CHAT, TOOLS, Server, case


class Warmest(dspy.Signature):
    """Name the warm town."""

    question: str = dspy.InputField()
    town: Literal["Ulm", "Bonn"] = dspy.OutputField()


class FollowsSchemas(dspy.LM):
    """A model behind a server that constrains answers to schemas, which DSPy assumes of none that it doesn't know."""

    @property
    def supports_response_schema(self) -> bool:
        return True


def predicted(server: Server, adapter: Any, **fields: Any) -> Any:
    """The prediction of a signature."""
    base = {"api_base": server.v1, "api_key": server.key, "cache": False, "max_tokens": 400, "num_retries": 0}
    model = FollowsSchemas(f"openai/{server.model}", **base, **fields)
    with dspy.context(lm=model, adapter=adapter):
        return dspy.Predict(Warmest)(question="Which town is warm?")


@case("dspy", "the model itself", CHAT)
def _(server: Server) -> None:
    base = {"api_base": server.v1, "api_key": server.key, "cache": False, "max_tokens": 8}
    assert dspy.LM(f"openai/{server.model}", **base)("Hello")


@case("dspy", "Predict, as JSON", CHAT, TOOLS)
def _(server: Server) -> None:
    assert predicted(server, dspy.JSONAdapter()).town in ("Ulm", "Bonn")


@case("dspy", "completions", CHAT)
def _(server: Server) -> None:
    base = {"api_base": server.v1, "api_key": server.key, "cache": False, "max_tokens": 8}
    assert dspy.LM(f"text-completion-openai/{server.model}", model_type="text", **base)("Hello")
