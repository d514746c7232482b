"""What a rank keeps of the data of images, and what it asks clients for."""

from __future__ import annotations

from raycore.lru_bytes import LruBytes
from raycore.messages import EngineRequest, Feature, FeatureData
from raycore.parts.images.engine import FeatureInputs
from raycore.sampling_params import SamplingParams


def request(*parts: tuple[str, bytes | None]) -> EngineRequest:
    features = [Feature(identifier, index, 1) for index, (identifier, _) in enumerate(parts)]
    data = [None if given is None else FeatureData(given, [len(given)]) for _, given in parts]
    return EngineRequest(0, "r", [1] * len(parts), SamplingParams(), 0, features=features, feature_data=data)


def inputs_of(max_bytes: int) -> FeatureInputs:
    return FeatureInputs(max_bytes, lambda: None)


def contents(asked: EngineRequest) -> list[bytes | None]:
    return [data and data.data for data in asked.feature_data]


def test_data_is_sent_once_and_found_by_later_requests():
    inputs = inputs_of(100)
    assert inputs.complete(request(("a", b"1"), ("b", b"2"))) == []
    later = request(("b", None), ("a", None), ("b", None))
    assert inputs.complete(later) == []
    assert contents(later) == [b"2", b"1", b"2"]
    assert later.feature_data[0] is later.feature_data[2]


def test_missing_data_is_asked_for_once():
    inputs = inputs_of(100)
    assert inputs.complete(request(("a", b"1"), ("b", None), ("b", None), ("c", None))) == ["b", "c"]


def test_a_request_has_its_data_even_if_the_rank_keeps_none():
    for size in (0, 1):
        inputs = inputs_of(size)
        asked = request(("a", b"11"), ("b", b"22"), ("a", None))
        assert inputs.complete(asked) == []
        assert contents(asked) == [b"11", b"22", b"11"]
        assert inputs.complete(request(("a", None))) == ["a"]


def test_what_clients_have_dropped_is_asked_for():
    inputs = inputs_of(100)
    asked = request(("a", b"1"))
    inputs.complete(asked)
    inputs.calls()["reset_mm_cache"]()
    assert inputs.complete(request(("a", None))) == ["a"]
    assert contents(asked) == [b"1"], "unfinished requests keep theirs"


def test_the_least_recently_used_values_give_way():
    cache: LruBytes[str] = LruBytes(10)
    for name, size in (("a", 4), ("b", 4), ("c", 2)):
        cache.put(name, name, size)
    assert cache.get("a") == "a"
    cache.put("d", "d", 3)
    assert ["b" in cache, "a" in cache, cache.num_bytes] == [False, True, 9]
    cache.put("a", "longer", 11)
    assert ["a" in cache, cache.num_bytes, len(cache)] == [False, 5, 2]
