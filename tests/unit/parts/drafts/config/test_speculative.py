from __future__ import annotations

import pytest

from raycore.errors import InvalidConfig
from raycore.parts.drafts.config.speculative import SpeculativeConfig, parse_speculative_config


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ({}, None),
        ("{}", None),
        ({"method": "ngram", "num_speculative_tokens": 4}, SpeculativeConfig("ngram", 4)),
        ('{"method": "ngram", "num_speculative_tokens": 4}', SpeculativeConfig("ngram", 4)),
        # as in vLLM, either bound is the other's default
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
            SpeculativeConfig("ngram", 2, prompt_lookup_min=3, prompt_lookup_max=3),
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 7},
            SpeculativeConfig("ngram", 2, prompt_lookup_min=7, prompt_lookup_max=7),
        ),
        ({"method": "suffix"}, SpeculativeConfig("suffix", 24)),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 8},
            SpeculativeConfig("suffix", 8, suffix_decoding_max_tree_depth=8),
        ),
        (
            '{"method": "suffix", "num_speculative_tokens_per_batch_size": [[1, 4, 3], [9, 16, 0]]}',
            SpeculativeConfig("suffix", 24, num_speculative_tokens_per_batch_size=[(1, 4, 3), (9, 16, 0)]),
        ),
        ({"method": "mtp", "num_speculative_tokens": 2}, SpeculativeConfig("mtp", 2)),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 2}, SpeculativeConfig("mtp", 2)),
        # values that change nothing
        (
            {"method": "ngram", "num_speculative_tokens": 1, "rejection_sample_method": "standard", "model": None},
            SpeculativeConfig("ngram", 1),
        ),
    ],
)
def test_speculative_config_is_parsed_with_its_defaults(value, expected) -> None:
    assert parse_speculative_config(value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[]", "speculative_config"),
        (
            {"method": "medusa", "num_speculative_tokens": 3},
            "method='medusa' is not supported: use 'ngram', 'suffix', 'draft_model', 'eagle3' or 'mtp'",
        ),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        (
            {"method": "mtp", "num_speculative_tokens": 2, "model": "a/b"},
            "model='a/b', and method='mtp' drafts with layers of the engine's own checkpoint: omit it",
        ),
        ({"method": "ngram", "num_speculative_tokens": 0}, ">= 1"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "<= 64"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "look_back": 3},
            "unknown setting 'look_back'; known are method",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min=4 is above prompt_lookup_max=3",
        ),
        *(
            ({"method": "suffix", "num_speculative_tokens_per_batch_size": ranges}, message)
            for ranges, message in (
                ([[2, 4, 3]], "2 to 4 is wrong"),
                ([[1, 4, 3], [4, 8, 2]], "4 to 8 is wrong"),
                ([[1, 4, 3], [8, 6, 2]], "8 to 6 is wrong"),
                ([[0, 4, 3]], ">= 1"),
                ([[1, 4, -1]], ">= 0"),
                ([], ">= 1"),
            )
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "block"},
            "rejection_sample_method='block' is not supported: a draft is accepted exactly if",
        ),
    ],
)
def test_unsupported_speculative_settings_are_refused_by_name(value, message) -> None:
    with pytest.raises(InvalidConfig, match="speculative_config") as caught:
        parse_speculative_config(value)
    assert message in str(caught.value)


@pytest.mark.parametrize(("num_decodes", "length"), [(1, 3), (4, 3), (6, 3), (9, 1), (16, 1), (100, 1)])
def test_the_draft_length_of_a_batch_is_that_of_its_size_range(num_decodes: int, length: int) -> None:
    config = SpeculativeConfig("suffix", 24, num_speculative_tokens_per_batch_size=[(1, 4, 3), (9, 16, 1)])
    assert config.fixed_length(num_decodes) == length
