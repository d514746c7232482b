"""Options of the model that are more than a value."""

import pytest

from raycore.config.model import parse_loader_config
from raycore.errors import InvalidConfig


def test_a_file_pattern_is_the_only_model_loader_extra_config() -> None:
    assert parse_loader_config('{"pattern": "m-{rank}-{part}.safetensors"}') == {
        "pattern": "m-{rank}-{part}.safetensors"
    }
    assert parse_loader_config({}) is parse_loader_config(None) is parse_loader_config({"pattern": None}) is None
    for wrong in ("no json", [1], {"patern": "x"}):
        with pytest.raises(InvalidConfig, match="model_loader_extra_config"):
            parse_loader_config(wrong)  # pyright: ignore
