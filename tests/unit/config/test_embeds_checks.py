"""What prompts of embeddings can't be used with, and what they mean for an engine's limits."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig
from raycore.parts.images.config import EncoderLimits

DRAFTS = {"method": "draft_model", "model": str(demo_model_path()), "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculative_config": DRAFTS}, "speculative_config's method 'draft_model', whose model needs tokens"),
    ],
)
def test_what_they_cannot_be_used_with_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match="enable_prompt_embeds=True can't be used with") as refused:
        resolve(demo_model_path(), enable_prompt_embeds=True, **options)
    assert reason in str(refused.value)


def test_engines_keep_the_embeddings_of_a_step_and_little_of_what_came() -> None:
    plain = resolve(demo_model_path())
    assert plain.encoder_limits is None
    config = resolve(demo_model_path(), enable_prompt_embeds=True, max_num_batched_tokens=2048)
    assert config.encoder_limits == EncoderLimits(2048, 128)
    assert config.feature_cache_bytes == 256 << 20
    few = resolve(demo_model_path(), enable_prompt_embeds=True, max_num_batched_tokens=16, mm_processor_cache_gb=0)
    assert few.encoder_limits == EncoderLimits(128, 128)
    assert few.feature_cache_bytes == 0
