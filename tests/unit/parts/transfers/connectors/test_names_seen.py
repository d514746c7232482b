"""Engines that share a directory of embeddings under different names: the log says so."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from raycore.parts.transfers.config.ec_transfer import ECTransferConfig, parse_ec_transfer_config
from raycore.parts.transfers.connectors.embeddings import EmbeddingStore

DATA = np.arange(200, dtype=np.uint8)


def store(path: Path, role: str, model: str, *, writes_files: bool = True) -> EmbeddingStore:
    config: ECTransferConfig | None = parse_ec_transfer_config(
        {"ec_connector": "ECStoreConnector", "ec_role": role, "ec_connector_extra_config": {"path": str(path)}}
    )
    assert config is not None
    return EmbeddingStore(config, model, writes_files=writes_files)


@pytest.mark.parametrize(
    ("model", "weights"), [("bfloat16", "w1"), ("float32", "w2")], ids=["other numbers", "other weights"]
)
def test_a_consumer_warns_once_why_it_finds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: str, weights: str
) -> None:
    consumer = store(tmp_path, "ec_consumer", "float32")
    assert consumer.load("w1 image", 200) is None
    assert not caplog.text, "nobody has saved anything"
    store(tmp_path, "ec_producer", model).save(f"{weights} image", DATA)
    with caplog.at_level(logging.WARNING):
        for image in range(3):
            assert consumer.load(f"w1 image{image}", 200) is None
    (record,) = caplog.records
    assert f"They are of (weights {weights}, {model}), and this engine's of (weights w1, float32)" in record.message


def test_equal_names_are_no_reason_to_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    consumer = store(tmp_path, "ec_consumer", "float32")
    store(tmp_path, "ec_producer", "float32").save("w1 image", DATA)
    store(tmp_path, "ec_producer", "bfloat16").save("w1 image", DATA)
    assert consumer.load("w1 image", 200) is not None
    assert consumer.load("w1 other", 200) is None
    assert not caplog.records


def test_only_consumers_warn_and_one_worker_of_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store(tmp_path, "ec_producer", "bfloat16").save("w1 image", DATA)
    assert store(tmp_path, "ec_both", "float32").load("w1 image", 200) is None
    assert store(tmp_path, "ec_consumer", "float32", writes_files=False).load("w1 image", 200) is None
    assert not caplog.records


def test_engines_that_have_ended_do_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store(tmp_path, "ec_producer", "bfloat16").save("w1 image", DATA)
    (note,) = tmp_path.glob("*.names")
    os.utime(note, (5, 5))
    assert store(tmp_path, "ec_consumer", "float32").load("w1 image", 200) is None
    assert not caplog.records
