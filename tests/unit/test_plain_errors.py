"""What is said of values that msgspec refuses."""

from typing import Annotated, Literal

import msgspec
import pytest

from raycore.errors import InvalidConfig
from raycore.options.declared import settings_of
from raycore.plain_errors import decode_problem, unsupported_value


class Settings(msgspec.Struct):
    method: Literal["slow", "fast"]
    sizes: list[Annotated[int, msgspec.Meta(ge=1)]] = []


class Body(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    ratio: float = 0.0
    deep: Settings | None = None
    size: int | str | None = None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "expected an object"),
        ('{"name": 3}', "name: expected a string"),
        ('{"name": "a", "ratio": "b"}', "ratio: expected a number"),
        ("{}", "name is missing"),
        ('{"name": "a", "deep": {}}', "deep: method is missing"),
        ('{"name": "a", "other": 1}', "'other' is unknown"),
        ('{"name": "a", "deep": {"method": "slow", "sizes": [0]}}', "deep.sizes[...]: expected an integer >= 1"),
        ('{"name": "a", "deep": 3}', "deep: expected an object or null"),
        ('{"name": "a", "size": []}', "size: expected an integer, a string or null"),
        ("{", "Input data was truncated"),
    ],
)
def test_error_messages_name_types_in_plain_words(text: str, problem: str) -> None:
    with pytest.raises(msgspec.DecodeError) as raised:
        msgspec.json.decode(text, type=Body)
    # some versions of msgspec name the item
    assert decode_problem(raised.value).replace("[0]", "[...]") == problem


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "quick"}, "pace: method='quick' is not supported: use 'slow' or 'fast'"),
        ({"method": 3}, "pace: method=3 is not supported: use 'slow' or 'fast'"),
        ({}, "pace: method is missing"),
        ({"method": "slow", "size": []}, "pace: unknown setting 'size'; did you mean sizes?"),
        ({"method": "slow", "x": []}, "pace: unknown setting 'x'; known are method, sizes"),
        ({"method": "slow", "sizes": 3}, "pace: sizes=3: expected a list"),
    ],
)
def test_wrong_settings_are_refused_with_a_plain_message(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        settings_of("pace", given, Settings)
    assert str(raised.value) == message


def test_an_unsupported_value_is_refused_with_the_supported_ones() -> None:
    assert unsupported_value("a", "x", ["y"]) == "a='x' is not supported: use 'y'"
    assert unsupported_value("a", "x" * 999, ["y", "z", None]).endswith(
        "… (1001 characters) is not supported: use 'y', 'z' or None"
    )
