"""An image travels once to each rank, and again if the rank has dropped it."""

from __future__ import annotations

from raycore.messages import EngineRequest, Feature, FeatureData
from raycore.parts.images.client.sent_features import SentFeatures
from raycore.sampling_params import SamplingParams


def request(*identifiers: str) -> EngineRequest:
    features = [Feature(identifier, index, 1) for index, identifier in enumerate(identifiers)]
    data = [FeatureData(identifier.encode(), [1]) for identifier in identifiers]
    return EngineRequest(0, "r", [1, 2, 3], SamplingParams(), 0, features=features, feature_data=data)


def sent(features: SentFeatures, dp_rank: int, *identifiers: str) -> list[bool]:
    asked = request(*identifiers)
    told = features.without_known(dp_rank, asked)
    assert None not in asked.feature_data, "the client needs it if the rank dies"
    return [data is not None for data in told.feature_data]


def test_data_is_sent_to_each_rank_once_until_it_has_nothing():
    features = SentFeatures(100)
    assert sent(features, 0, "a", "b", "a") == [True, True, False]
    assert sent(features, 0, "b", "c") == [False, True]
    assert sent(features, 1, "a") == [True]
    features.forget(0)
    assert [sent(features, 0, "a"), sent(features, 1, "a")] == [[True], [False]]
    features.clear()
    assert sent(features, 1, "a") == [True]


def test_data_that_a_rank_has_no_room_for_is_sent_again():
    features = SentFeatures(2)
    assert [sent(features, 0, "a", "b"), sent(features, 0, "c"), sent(features, 0, "b")] == [
        [True] * 2,
        [True],
        [False],
    ]
    assert sent(features, 0, "a") == [True]
    assert sent(SentFeatures(0), 0, "a", "a") == [True, True]


def test_requests_of_texts_stay_as_they_are():
    asked = request()
    assert SentFeatures(2).without_known(0, asked) is asked
