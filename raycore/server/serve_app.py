"""OpenAI's API under Ray Serve: each replica starts an engine and serves the application of `build_app` over it.

In a Serve configuration this is `import_path: raycore.server.serve_app:build_serve_app`, with the builder's arguments
below `args`; on the command line `serve run raycore.server.serve_app:build_serve_app model=DIR`. Needs the extra
`ray-serve`. A replica only passes requests on, so it takes no CPU of its own; the engine's ranks reserve theirs.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUntypedClassDecorator=false

from __future__ import annotations

import asyncio
import inspect
import os
from typing import Any, get_type_hints

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, create_model
from ray import serve

from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.errors import EngineDeadError, InvalidConfig
from raycore.llm import AsyncLLM
from raycore.server.app import build_app
from raycore.server.options import ServerOptions, read_chat_template

DRAIN_TIMEOUT_S = 60.0
"""A replica that has to go may finish its requests for this long. A pod's termination grace period has to be longer."""

_HEALTH_CHECK_PERIOD_S = 5.0

_MAX_STARTS = 3
"""Serve's own 20 would load a model that can't work 20 times."""


class ServerArguments(BaseModel):
    """What the builder takes beside the engine's options, which are those of `raycore.config.resolve`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    """A checkpoint's directory, the same on all nodes; None is the bundled model."""
    served_model_name: str | list[str] | None = None
    """What clients may call the model; None is its path."""
    chat_template: str | None = None
    """Jinja text, or a file of the replica's node; None is the checkpoint's own."""
    trust_request_chat_template: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    max_concurrent_requests: PositiveInt = ServerOptions.max_streams
    """Of each replica."""


def _engine_fields() -> dict[str, Any]:
    hints = get_type_hints(resolve)
    options = list(inspect.signature(resolve).parameters.values())[1:]
    return {option.name: (hints[option.name], option.default) for option in options}


_Arguments = create_model("Arguments", __base__=ServerArguments, **_engine_fields())


def build_serve_app(args: dict[str, Any]) -> serve.Application:
    """A Serve application with one deployment, `raycore`.

    Args:
        args: fields of `ServerArguments` and options of `raycore.config.resolve`, as text (`dtype=float32` on the
            command line) or as what they are. API keys come from the replicas' environment: RAYCORE_API_KEY.

    Raises:
        InvalidConfig: an argument isn't known, or has the wrong type.
    """
    try:
        arguments = _Arguments.model_validate(args)
    except ValidationError as error:
        raise InvalidConfig(_first_mistake(error)) from error
    given = arguments.model_dump(exclude_unset=True)
    server = {name: given.pop(name) for name in ServerArguments.model_fields if name in given}
    # Serve then holds back what the server would refuse
    deployment: Any = Raycore
    return deployment.options(max_ongoing_requests=arguments.max_concurrent_requests).bind(server, given)


def _first_mistake(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"unknown argument {name!r}; there are {', '.join(_Arguments.model_fields)}"
    return f"{name}={first['input']!r}: {first['msg']}"


@serve.deployment(
    name="raycore",
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
    health_check_period_s=_HEALTH_CHECK_PERIOD_S,
    max_constructor_retry_count=_MAX_STARTS,
)
@serve.ingress()
class Raycore:
    """A replica: an engine, and the server over it. Serve drains it, and then calls `__del__`."""

    async def __init__(self, server: dict[str, Any], engine: dict[str, Any]) -> None:
        """Takes what `build_serve_app` has checked, and returns once the engine can serve."""
        arguments = ServerArguments(**server)
        model = arguments.model or str(demo_model_path())
        names = arguments.served_model_name or model
        self._options = ServerOptions(
            served_model_names=(names,) if isinstance(names, str) else tuple(names),
            api_keys=tuple(key for key in [os.environ.get("RAYCORE_API_KEY")] if key),
            chat_template=read_chat_template(arguments.chat_template),
            trust_request_chat_template=arguments.trust_request_chat_template,
            tool_call_parser=arguments.tool_call_parser,
            reasoning_parser=arguments.reasoning_parser,
            max_streams=arguments.max_concurrent_requests,
        )
        # a model can take minutes to load: Serve's calls are answered meanwhile
        self._engine = await AsyncLLM.create(model, use_tqdm_on_load=False, **engine)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self._engine, self._options)

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises."""
        unavailable_reason = self._engine.unavailable_reason
        if unavailable_reason is not None:
            raise EngineDeadError(unavailable_reason)

    async def __del__(self) -> None:
        if hasattr(self, "_engine"):
            await asyncio.to_thread(self._engine.shutdown)
