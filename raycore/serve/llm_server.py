"""The `server_cls` for `ray.serve.llm.LLMConfig`: raycore's engine behind the ingress of Ray's own application.

That application needs vLLM to be installed, because its requests and responses are vLLM's.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from importlib import import_module
from typing import Any

import msgspec
from starlette.types import ASGIApp

from raycore.errors import EngineDeadError, InvalidConfig
from raycore.serve.app import check_paths, deployment_fields
from raycore.serve.config import ModelDeployment, arguments, deployment_options, model_config
from raycore.serve.http_calls import HttpCall, ResponseStart
from raycore.serve.served_model import ServedModel
from raycore.server.endpoints import Endpoint
from raycore.server.serve_app import DEPLOYMENT

_MODELS = "ray.llm._internal.serve.core.configs.openai_api_models"
"""Where Ray has its requests and responses: `ray.serve.llm` has only some of them."""
_IGNORED = ("server_cls", "accelerator_config", "callback_config", "llm_engine")
"""Fields of an `LLMConfig` that say which engine it is, or that Ray fills in itself."""
_NOT_FORWARDED = frozenset(("content-length", "content-type", "transfer-encoding", "connection", "host"))


class RaycoreServer:
    """Has the methods that Ray calls `LLMServerProtocol`."""

    async def __init__(self, llm_config: Any) -> None:
        """Start the engine, and return once it can serve.

        Args:
            llm_config: a `ray.serve.llm.LLMConfig`.

        Raises:
            InvalidConfig: the configuration can't be followed. Other errors are those of `AsyncLLM`.
        """
        self._prepare(llm_config)
        await self.start()

    @classmethod
    def sync_init(cls, llm_config: Any) -> RaycoreServer:
        """A server whose engine `start()` starts. Raises InvalidConfig."""
        server = cls.__new__(cls)
        server._prepare(llm_config)
        return server

    def _prepare(self, llm_config: Any) -> None:
        self._llm_config = llm_config
        self._arguments = arguments(_config_of(llm_config))
        self._served: ServedModel | None = None

    async def start(self) -> None:
        """Start the engine, and return once it can serve. Raises the errors of `AsyncLLM`."""
        self._served = await ServedModel.start(self._arguments)

    @property
    def _running(self) -> ServedModel:
        if self._served is None:
            raise EngineDeadError("the engine hasn't been started: call start()")
        return self._served

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._running.app

    # ---- requests

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Respond to a `ChatCompletionRequest`: a `ChatCompletionResponse`, or the text of a stream's events."""
        return self._answers(Endpoint.CHAT_COMPLETIONS, request, raw_request_info, "ChatCompletionResponse")

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Respond to a `CompletionRequest`: a `CompletionResponse`, or the text of a stream's events."""
        return self._answers(Endpoint.COMPLETIONS, request, raw_request_info, "CompletionResponse")

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Respond to an `EmbeddingRequest` with an `EmbeddingResponse`."""
        return self._answers(Endpoint.EMBEDDINGS, request, raw_request_info, "EmbeddingResponse")

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Respond to a `ScoreRequest` with a `ScoreResponse`."""
        return self._answers(Endpoint.SCORE, request, raw_request_info, "ScoreResponse")

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Respond to a `TokenizeRequest` with a `TokenizeResponse`."""
        return self._answers(Endpoint.TOKENIZE, request, raw_request_info, "TokenizeResponse")

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Respond to a `DetokenizeRequest` with a `DetokenizeResponse`."""
        return self._answers(Endpoint.DETOKENIZE, request, raw_request_info, "DetokenizeResponse")

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Respond with an `ErrorResponse`: raycore has no models that hear."""
        return _alone(_error(501, "raycore has no models that transcribe speech", "NotImplementedError"))

    async def _answers(
        self, endpoint: Endpoint, request: Any, raw_request_info: Any, response: str
    ) -> AsyncGenerator[Any, None]:
        """Yield what raycore's own server responds."""
        given: dict[str, str] = {} if raw_request_info is None else raw_request_info.headers
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in given.items()
            if name.lower() not in _NOT_FORWARDED
        ]
        body = request.model_dump_json(exclude_unset=True).encode()
        call = HttpCall(endpoint.method, endpoint.path, [*headers, (b"content-type", b"application/json")], body)
        async with aclosing(self._running.respond(call)) as parts:
            start = await anext(parts)
            assert isinstance(start, ResponseStart)
            if start.status == 200 and getattr(request, "stream", False):
                async for part in parts:
                    assert isinstance(part, bytes)
                    yield part.decode()
                return
            said = msgspec.json.decode(b"".join([part async for part in parts if isinstance(part, bytes)]))
        if start.status == 200:
            yield _made(response, said)
        else:
            error = said["error"]
            yield _error(start.status, error["message"], error["type"], error["param"])

    # ---- the engine

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine refuses requests. Serve then replaces the replica."""
        self._running.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `QueuedTokensPolicy` reads."""
        return self._running.autoscaling_stats()

    async def reset_prefix_cache(self) -> None:
        """See `AsyncLLM.reset_prefix_cache`."""
        await self._running.engine.reset_prefix_cache()

    async def sleep(self, **options: Any) -> None:
        """See `AsyncLLM.sleep`."""
        await self._running.engine.sleep(**options)

    async def wakeup(self, **options: Any) -> None:
        """See `AsyncLLM.wake_up`."""
        await self._running.engine.wake_up(**options)

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""
        return await self._running.engine.is_sleeping()

    async def pause(self, **options: Any) -> None:
        """See `AsyncLLM.pause_generation`."""
        await self._running.engine.pause_generation(**options)

    async def resume(self, **options: Any) -> None:
        """See `AsyncLLM.resume_generation`."""
        await self._running.engine.resume_generation(**options)

    async def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return await self._running.engine.is_paused()

    async def start_profile(self) -> None:
        """See `AsyncLLM.start_profile`. Needs `profiler_config` in the `engine_kwargs` of the `LLMConfig`."""
        await self._running.engine.start_profile()

    async def stop_profile(self) -> None:
        """See `AsyncLLM.stop_profile`."""
        await self._running.engine.stop_profile()

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """See `AsyncLLM.collective_rpc`."""
        return await self._running.engine.collective_rpc(method, timeout, args, kwargs)

    async def llm_config(self) -> Any:
        """The `LLMConfig`."""
        return self._llm_config

    async def __del__(self) -> None:
        served = getattr(self, "_served", None)
        if served is not None:
            await served.shutdown()

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """The options of the deployment of an `LLMConfig`. The engine has placement groups of its own.

        Raises:
            InvalidConfig: the configuration can't be followed. The message names what can't.
        """
        config = _config_of(llm_config)
        check_paths("LLMConfig", config)
        options = {**DEPLOYMENT, **deployment_options(config, deployment_fields())}
        name = config.deployment_config.get("name")
        options.pop("name")  # Ray makes one of the model's id
        return options if name is None else {**options, "name": name}


def _config_of(llm_config: Any) -> ModelDeployment:
    given = llm_config.model_dump(exclude_unset=True)
    return model_config("LLMConfig", {name: value for name, value in given.items() if name not in _IGNORED})


def _made(name: str, fields: dict[str, Any]) -> Any:
    """An instance of one of Ray's responses."""
    try:
        return getattr(import_module(_MODELS), name).model_validate(fields)
    except ImportError as error:
        raise InvalidConfig(f"RaycoreServer needs vLLM; raycore.serve.build_openai_app doesn't ({error})") from error


def _error(status: int, message: str, kind: str, param: str | None = None) -> Any:
    return _made("ErrorResponse", {"error": {"message": message, "type": kind, "param": param, "code": status}})


async def _alone(response: Any) -> AsyncGenerator[Any, None]:
    yield response
