"""A value of each sampling parameter that isn't its default: what tests of requests, batches and steps run."""

from __future__ import annotations

from typing import Any

from raycore.sampling_params import RepetitionDetectionParams

CHANGING_DRAWS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "top_n_sigma": 3.0,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.3,
    "logit_bias": {5: 4.0},
    "allowed_token_ids": list(range(30, 60)),
    "min_tokens": 3,
    "stop_token_ids": [5],
}
"""Of the parameters that decide which token is drawn. They may be given together."""

CHANGING_OUTPUTS: dict[str, Any] = {
    "n": 2,
    "seed": 7,
    "stop": ["x"],
    "bad_words": ["x"],
    "ignore_eos": True,
    "prompt_logprobs": 1,
    "thinking_token_budget": 9,
    "repetition_detection": RepetitionDetectionParams(3, 0, 2),
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "on_version_change": "fail",
}
"""Of the others that requests over HTTP have, too."""
