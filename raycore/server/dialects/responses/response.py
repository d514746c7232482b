"""The response object: what a response says of itself, besides its output. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raycore.sampling_params import SamplingParams
from raycore.server.chat.parts import Totals
from raycore.server.dialects.responses.protocol import ResponsesRequest


@dataclass(frozen=True)
class ResponseHead:
    """The fields of a response that are the same from its beginning to its end."""

    id: str
    model: str
    created: int
    """Unix time in seconds."""
    body: ResponsesRequest
    params: SamplingParams
    is_stored: bool

    @staticmethod
    def of(
        body: ResponsesRequest, response_id: str, model: str, params: SamplingParams, is_stored: bool
    ) -> ResponseHead:
        """The head of a response that is created now."""
        return ResponseHead(response_id, model, int(time.time()), body, params, is_stored)

    def response(
        self,
        status: str,
        output: Sequence[dict[str, Any]] = (),
        totals: Totals | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The response object.

        Args:
            totals: the numbers of tokens, if they are known.
            error: why the response has failed.
        """
        body, params = self.body, self.params
        text, reasoning = body.text, body.reasoning
        form = {"type": "text"} if text is None or text.format is None else _dumped(text.format)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": bool(body.background),
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary,
            },
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self.is_stored,
            "temperature": params.temperature,
            "text": {"format": form, "verbosity": (None if text is None else text.verbosity) or "medium"},
            "tool_choice": _dumped(body.tool_choice) or "auto",
            "tools": [
                {"type": "function", **{name: getattr(tool, name) for name in _TOOL_FIELDS}}
                for tool in body.tools or []
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if totals is None else _usage(totals),
            "user": body.user,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
        }


_TOOL_FIELDS = ("name", "description", "parameters", "strict")


def _usage(totals: Totals) -> dict[str, Any]:
    return {
        "input_tokens": totals.prompt,
        "input_tokens_details": {"cached_tokens": totals.cached, "cache_write_tokens": 0},
        "output_tokens": totals.output,
        "output_tokens_details": {"reasoning_tokens": totals.reasoning or 0},
        "total_tokens": totals.prompt + totals.output,
    }


def _dumped(value: Any) -> Any:
    return value.model_dump(exclude_none=True, by_alias=True) if hasattr(value, "model_dump") else value
