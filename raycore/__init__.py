"""raycore: an inference engine for large language models, built on Ray actors.

The life of a request::

    caller ── prompt ──► EngineClient (client/)      tokenize, pick a rank
       submit(batch)          │  actor call
                              ▼
            DPEngineCoreActor (engine/engine_actor.py)      one per data-parallel rank
                     mailbox ─► EngineCore.step()    engine/core.py: no Ray, no torch
                                  scheduler.schedule()  ─► StepPlan       (scheduler/, kvcache/)
                                  executor.execute(plan) ─► channel ─► WorkerActor ─► Worker (worker/, runner/)
                                  scheduler.update(plan, result) ◄─ StepResult ◄─ channel ◄─┘
                     mailbox ◄─ outputs, one batch per step
       stream of batches      │  streaming generator
                              ▼
    caller ◄── text ── EngineClient                  detokenize, stop strings, finish reasons
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycore.config import PoolerConfig
    from raycore.errors import (
        EngineDeadError,
        InitializationError,
        InvalidAdapter,
        InvalidCheckpoint,
        InvalidConfig,
        InvalidRequest,
        PlacementShortage,
        RaycoreError,
        RequestFailed,
        RequestTooLarge,
    )
    from raycore.llm import LLM, AsyncLLM
    from raycore.lora.request import LoRARequest
    from raycore.outputs import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
    )
    from raycore.pooling_params import PoolingParams
    from raycore.sampling_params import SamplingParams
    from raycore.status import RankStatus
    from raycore.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "raycore.llm",
    "AsyncLLM": "raycore.llm",
    "SamplingParams": "raycore.sampling_params",
    "LoRARequest": "raycore.lora.request",
    "StructuredOutputsParams": "raycore.structured_outputs",
    "RequestOutput": "raycore.outputs",
    "CompletionOutput": "raycore.outputs",
    "Logprob": "raycore.outputs",
    "PoolingParams": "raycore.pooling_params",
    "PoolerConfig": "raycore.config",
    "PoolingRequestOutput": "raycore.outputs",
    "PoolingOutput": "raycore.outputs",
    "EmbeddingOutput": "raycore.outputs",
    "ClassificationOutput": "raycore.outputs",
    "ScoringOutput": "raycore.outputs",
    "RankStatus": "raycore.status",
    "RaycoreError": "raycore.errors",
    "EngineDeadError": "raycore.errors",
    "InitializationError": "raycore.errors",
    "InvalidAdapter": "raycore.errors",
    "InvalidCheckpoint": "raycore.errors",
    "InvalidConfig": "raycore.errors",
    "InvalidRequest": "raycore.errors",
    "PlacementShortage": "raycore.errors",
    "RequestFailed": "raycore.errors",
    "RequestTooLarge": "raycore.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineDeadError",
    "InitializationError",
    "InvalidAdapter",
    "InvalidCheckpoint",
    "InvalidConfig",
    "InvalidRequest",
    "LoRARequest",
    "Logprob",
    "PlacementShortage",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RankStatus",
    "RaycoreError",
    "RequestFailed",
    "RequestOutput",
    "RequestTooLarge",
    "SamplingParams",
    "ScoringOutput",
    "StructuredOutputsParams",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # imported lazily, so that a worker process that needs one submodule doesn't import the client
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
