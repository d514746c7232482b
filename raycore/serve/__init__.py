"""raycore under Ray Serve, with the configurations of `ray.serve.llm`.

::

    app = build_openai_app({"llm_configs": [{"model_loading_config": {"model_id": "m", "model_source": "path"}}]})
    serve.run(app)

Needs the extra `ray-serve`. Where vLLM is installed, `ray.serve.llm.LLMConfig(server_cls=RaycoreServer)` serves by
raycore, too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raycore.extras import needing

if TYPE_CHECKING:
    from raycore.serve.app import build_openai_app
    from raycore.serve.autoscaling import QueuedTokensPolicy, queued_tokens_policy
    from raycore.serve.llm_server import RaycoreServer

_HOMES = {
    "QueuedTokensPolicy": "raycore.serve.autoscaling",
    "RaycoreServer": "raycore.serve.llm_server",
    "build_openai_app": "raycore.serve.app",
    "queued_tokens_policy": "raycore.serve.autoscaling",
}

__all__ = ["QueuedTokensPolicy", "RaycoreServer", "build_openai_app", "queued_tokens_policy"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # imported on first use: Serve's controller imports the policy, and needs nothing else
    if name in _HOMES:
        with needing(f"raycore.serve.{name} needs", "ray-serve"):
            return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
