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
    from raycore.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from raycore.config import PoolerConfig
    from raycore.engine_args import AsyncEngineArgs, EngineArgs
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
        WeightVersionChanged,
    )
    from raycore.inputs import EmbedsPrompt, ExplicitEncoderDecoderPrompt, TextPrompt, TokensPrompt
    from raycore.llm import LLM, AsyncLLM
    from raycore.llm import AsyncLLMEngine as AsyncLLMEngine
    from raycore.llm_engine import LLMEngine
    from raycore.lora.request import LoRARequest
    from raycore.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        FlatLogprobs,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from raycore.pooling_params import PoolingParams
    from raycore.sampling_params import RequestOutputKind, SamplingParams
    from raycore.status import RankStatus
    from raycore.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "raycore.llm",
    "AsyncLLM": "raycore.llm",
    "AsyncLLMEngine": "raycore.llm",
    "LLMEngine": "raycore.llm_engine",
    "EngineArgs": "raycore.engine_args",
    "AsyncEngineArgs": "raycore.engine_args",
    "SamplingParams": "raycore.sampling_params",
    "RequestOutputKind": "raycore.sampling_params",
    "TextPrompt": "raycore.inputs",
    "TokensPrompt": "raycore.inputs",
    "EmbedsPrompt": "raycore.inputs",
    "ExplicitEncoderDecoderPrompt": "raycore.inputs",
    "LoRARequest": "raycore.lora.request",
    "BeamSearchParams": "raycore.beam_search",
    "BeamSearchOutput": "raycore.beam_search",
    "BeamSearchSequence": "raycore.beam_search",
    "StructuredOutputsParams": "raycore.structured_outputs",
    "RequestOutput": "raycore.outputs",
    "CompletionOutput": "raycore.outputs",
    "Logprob": "raycore.outputs",
    "FlatLogprobs": "raycore.outputs",
    "RequestMetrics": "raycore.outputs",
    "PoolingParams": "raycore.pooling_params",
    "PoolerConfig": "raycore.config",
    "PoolingRequestOutput": "raycore.outputs",
    "PoolingOutput": "raycore.outputs",
    "EmbeddingOutput": "raycore.outputs",
    "EmbeddingRequestOutput": "raycore.outputs",
    "ClassificationOutput": "raycore.outputs",
    "ClassificationRequestOutput": "raycore.outputs",
    "ScoringOutput": "raycore.outputs",
    "ScoringRequestOutput": "raycore.outputs",
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
    "WeightVersionChanged": "raycore.errors",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineDeadError",
    "ExplicitEncoderDecoderPrompt",
    "FlatLogprobs",
    "InitializationError",
    "InvalidAdapter",
    "InvalidCheckpoint",
    "InvalidConfig",
    "InvalidRequest",
    "LLMEngine",
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
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestTooLarge",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WeightVersionChanged",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # imported lazily, so that a worker process that needs one submodule doesn't import the client
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
