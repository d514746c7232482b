"""A worker that follows grammars itself loads at startup what they need, if it is asked to."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig
from raycore.parts.constraints.worker import GrammarPreparation
from raycore.worker.core import WorkerCore
from raycore.worker.rank import WorkerRank


def prepared(**options: Any) -> GrammarPreparation:
    rank = WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1)
    return GrammarPreparation(WorkerCore(resolve(demo_model_path(), **options), rank))


def test_a_failed_load_for_prepare_structured_outputs_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    follows = {"scheduler_cls": "raycore.scheduler.scheduler.Scheduler"}
    prepared(**follows).warmed_up()  # nobody has asked for it
    prepared(**follows, prepare_structured_outputs=True).warmed_up()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    prepared(prepare_structured_outputs=True).warmed_up()  # the engine makes masks
    other = prepared(**follows, prepare_structured_outputs=True)
    with pytest.raises(InvalidConfig, match=r'prepare_structured_outputs=True: .*pip install "raycore\[structured\]"'):
        other.warmed_up()
