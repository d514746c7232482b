"""An engine that only encodes images refuses to answer."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.errors import InvalidRequest
from raycore.parts.images.client.encoding_only import check_encoding_only
from raycore.sampling_params import SamplingParams
from raycore.structured_outputs import StructuredOutputsParams


def test_what_a_proxy_asks_is_taken() -> None:
    check_encoding_only(SamplingParams(max_tokens=1, temperature=0.7, seed=3, n=2))


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 16},
        {"max_tokens": None},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"return_hidden_states": True},
        {"return_prompt_hidden_states": True},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_would_mean_nothing_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"^{next(iter(given))}=.*ec_consumer"):
        check_encoding_only(SamplingParams(**{"max_tokens": 1, **given}))
