"""What the flags of `raycore bench` let choose. Imports nothing, because even `raycore --help` imports it."""

from __future__ import annotations

DATASET_NAMES = ("random", "sharegpt", "custom", "sonnet", "prefix_repetition")
"""The keys of `raycore.cli.bench.samples.DATASETS`."""

BACKENDS = {
    "vllm": ("completions", "/v1/completions"),
    "openai": ("completions", "/v1/completions"),
    "openai-chat": ("chat", "/v1/chat/completions"),
    "openai-embeddings": ("embeddings", "/v1/embeddings"),
}
"""By the value of `--backend`: the kind of requests, and where they are sent to."""

SAMPLING_FLAGS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}
"""Fields of requests that have flags of their own."""
