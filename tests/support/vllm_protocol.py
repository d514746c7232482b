"""Writes a package `vllm` that has only the classes of requests and responses that `ray.serve.llm` needs.

Whatever fields they get, they keep: what is in them is raycore's and the client's matter.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

_CLASSES = {
    "openai.chat_completion": (
        "ChatCompletionRequest",
        "ChatCompletionResponse",
        "ChatCompletionStreamResponse",
    ),
    "openai.completion": ("CompletionRequest", "CompletionResponse", "CompletionStreamResponse"),
    "pooling.embed": ("EmbeddingChatRequest", "EmbeddingCompletionRequest", "EmbeddingResponse"),
    "pooling.scoring": ("ScoreResponse", "ScoreTextRequest"),
    "serve.engine": ("ErrorInfo", "ErrorResponse"),
    "serve.tokenize": (
        "DetokenizeRequest",
        "DetokenizeResponse",
        "TokenizeChatRequest",
        "TokenizeCompletionRequest",
        "TokenizeResponse",
    ),
    "speech_to_text.transcription": (
        "TranscriptionRequest",
        "TranscriptionResponse",
        "TranscriptionStreamResponse",
    ),
}
"""By package below `vllm.entrypoints`: the classes in its module `protocol`."""
_HEAD = """\
from pydantic import BaseModel, ConfigDict


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow")
"""
_FIELDS = {"ErrorResponse": "error: ErrorInfo", "ErrorInfo": "message: str\n    type: str\n    code: int"}


def write_vllm_protocol(directory: Path) -> None:
    """Write the package into a directory for PYTHONPATH, unless vLLM is installed."""
    if PathFinder.find_spec("vllm") is not None:  # not a module of that name that tests have put into this process
        return
    for package, names in _CLASSES.items():
        path = directory.joinpath("vllm", "entrypoints", *package.split("."))
        path.mkdir(parents=True)
        classes = [_class(name) for name in names]
        (path / "protocol.py").write_text("\n\n".join([_HEAD, *classes]))


def _class(name: str) -> str:
    request = "model: str | None = None\n    stream: bool = False"
    return f"class {name}(_Fields):\n    {_FIELDS.get(name, request if name.endswith('Request') else 'pass')}\n"
