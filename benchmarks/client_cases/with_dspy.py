"""DSPy, which writes prompts for signatures."""

from __future__ import annotations

from typing import Any, Literal

import dspy

from client_cases.cases import CHAT, TOOLS, Server, Town, case


class Warmest(dspy.Signature):
    """Name the warm town."""

    question: str = dspy.InputField()
    town: Literal["Ulm", "Bonn"] = dspy.OutputField()


class Described(dspy.Signature):
    """Describe the warm town."""

    question: str = dspy.InputField()
    town: Town = dspy.OutputField()


PROVIDER = "own-server"


def declare(server: Server) -> None:
    """Tell DSPy that the server's models follow schemas. It sends none to models that it doesn't know."""
    access = dspy.lm15.AccessPolicy(provider=PROVIDER, base_url=server.v1, auth_modes=("bearer",))
    definition = dspy.lm15.ProviderDefinition.chat(access, compat=dspy.lm15.OpenAIChatCompat.preset("vllm"))
    supports = dspy.lm15.ModelSupport(response_schema=True, function_calling=True)
    dspy.lm15.register_provider(definition, supports=supports)


def model_of(server: Server, **fields: Any) -> Any:
    """The declared model."""
    declare(server)
    base = {"api_base": server.v1, "api_key": server.key, "cache": False, "max_tokens": 400, "num_retries": 0}
    return dspy.LM(f"{PROVIDER}/{server.model}", **base, **fields)


@case("dspy", "the model itself", CHAT)
def _(server: Server) -> None:
    base = {"api_base": server.v1, "api_key": server.key, "cache": False, "max_tokens": 8}
    assert dspy.LM(f"openai/{server.model}", **base)("Hello")


@case("dspy", "Predict, as JSON", CHAT, TOOLS)
def _(server: Server) -> None:
    with dspy.context(lm=model_of(server), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Warmest)(question="Which town is warm?").town in ("Ulm", "Bonn")


@case("dspy", "Predict, a Pydantic model", CHAT, TOOLS)
def _(server: Server) -> None:
    with dspy.context(lm=model_of(server), adapter=dspy.JSONAdapter()):
        assert isinstance(dspy.Predict(Described)(question="Which town is warm?").town, Town)


@case("dspy", "completions", CHAT)
def _(server: Server) -> None:
    base = {"api_base": server.v1, "api_key": server.key, "cache": False, "max_tokens": 8}
    assert dspy.LM(f"text-completion-openai/{server.model}", model_type="text", **base)("Hello")
