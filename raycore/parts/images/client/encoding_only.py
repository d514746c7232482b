"""What requests may ask of an engine that only encodes images."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raycore.config import EngineConfig
from raycore.errors import InvalidRequest
from raycore.sampling_params import SamplingParams


def encoding_checks(config: EngineConfig) -> Iterator[Callable[[SamplingParams], None]]:
    """Yield what checks the parameters of an engine's requests."""
    if config.model.spec.encodes_only:
        yield check_encoding_only


def check_encoding_only(params: SamplingParams) -> None:
    """Raise InvalidRequest if a request asks for more than that its images are encoded.

    It gets one token, which means nothing: that is how proxies ask.
    """
    asked = {
        "max_tokens": params.max_tokens != 1,
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "return_hidden_states": params.return_hidden_states,
        "return_prompt_hidden_states": params.return_prompt_hidden_states,
        "structured_outputs": params.structured_outputs is not None,
    }
    found = next((name for name, is_asked in asked.items() if is_asked), None)
    if found is not None:
        raise InvalidRequest(
            f"{found}={getattr(params, found)!r}: this engine only encodes images (ec_role='ec_producer'), and its "
            "answers mean nothing: give max_tokens=1, and ask an engine with ec_role='ec_consumer' for texts"
        )
