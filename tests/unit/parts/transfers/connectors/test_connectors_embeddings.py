"""Embeddings of images that are kept besides the encoder cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raycore.errors import InvalidConfig
from raycore.parts.transfers.config.ec_transfer import ECTransferConfig, parse_ec_transfer_config
from raycore.parts.transfers.connectors.embeddings import EmbeddingStore, store_class

DATA = np.arange(200, dtype=np.uint8)


def config(**settings: object) -> ECTransferConfig:
    role = settings.pop("ec_role", "ec_both")
    parsed = parse_ec_transfer_config(
        {"ec_connector": "ECStoreConnector", "ec_role": role, "ec_connector_extra_config": settings}
    )
    assert parsed is not None
    return parsed


def test_memory_is_bounded_and_keeps_what_was_used_last():
    store = EmbeddingStore(config(cpu_bytes_to_use=500), "model")
    store.save("a", DATA)
    store.save("b", DATA + 1)
    assert store.load("a", 200) is not None
    store.save("c", DATA + 2)
    assert store.load("b", 200) is None
    found = store.load("a", 200)
    assert found is not None
    assert (found == DATA).all()
    assert store.load("a", 100) is None
    store.save("d", np.zeros(501, np.uint8))
    assert store.load("d", 501) is None
    assert store.load("c", 200) is not None


def test_a_directory_is_shared_by_workers_of_the_same_model(tmp_path: Path):
    settings = config(path=str(tmp_path))
    EmbeddingStore(settings, "model").save("a", DATA)
    found = EmbeddingStore(settings, "model", writes_files=False).load("a", 200)
    assert found is not None
    assert (found == DATA).all()
    assert EmbeddingStore(settings, "another").load("a", 200) is None
    (file,) = tmp_path.rglob("*.kv")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert EmbeddingStore(settings, "model").load("a", 200) is None


def test_roles_say_who_saves_and_who_loads(tmp_path: Path):
    consumer = EmbeddingStore(config(path=str(tmp_path), ec_role="ec_consumer"), "model")
    producer = EmbeddingStore(config(path=str(tmp_path), ec_role="ec_producer"), "model")
    consumer.save("a", DATA)
    assert consumer.load("a", 200) is None
    producer.save("a", DATA)
    assert producer.load("a", 200) is None
    assert consumer.load("a", 200) is not None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"ec_connector": "Other"}, "Other"),
        ({}, "ec_connector is missing"),
        ({"ec_connector": "ECStoreConnector", "ec_role": "x"}, "ec_role"),
        ({"ec_connector": "ECStoreConnector", "engine_id": "one"}, "engine_id='one' has no use"),
        ({"ec_connector": "ECStoreConnector", "ec_connector_extra_config": {"paht": "x"}}, "did you mean path"),
    ],
)
def test_settings_that_cannot_be_are_named(given: dict[str, object], named: str):
    with pytest.raises(InvalidConfig, match=named):
        parse_ec_transfer_config(given)


class OwnStore(EmbeddingStore):
    pass


def test_a_connector_of_ones_own_is_named_by_its_path():
    def named(path: str) -> type[EmbeddingStore]:
        parsed = parse_ec_transfer_config({"ec_connector": path})
        assert parsed is not None
        return store_class(parsed)

    assert named("ECStoreConnector") is EmbeddingStore
    assert named(f"{__name__}.OwnStore") is OwnStore
    with pytest.raises(InvalidConfig, match=r"'pathlib\.Path' isn't a subclass"):
        named("pathlib.Path")
    with pytest.raises(InvalidConfig, match="can't be imported"):
        named("nowhere.Store")
