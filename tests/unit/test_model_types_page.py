"""docs/model-types.md: every type of transformers is judged, and nothing that is said is out of date."""

from __future__ import annotations

import pytest
import transformers
import write_model_types as written
from compatibility.model_types import NOTES, OTHER_TYPES, REASONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raycore.models.registry import FAMILIES

ROWS = {row.name: row for row in written.causal_rows()}


def test_the_page_is_up_to_date() -> None:
    assert written.PAGE.read_text(encoding="utf-8") == written.page(), "run python docs/write_model_types.py"


def test_every_refused_type_has_one_reason_and_no_other_type_has_any() -> None:
    explained = [name for names in REASONS.values() for name in names]
    assert sorted(explained) == sorted(row.name for row in ROWS.values() if row.status == written.REFUSED)


def test_notes_are_of_types_that_are_computed() -> None:
    computed = {row.name for row in (*ROWS.values(), *written.other_rows()) if row.status != written.REFUSED}
    assert set(NOTES) <= computed


def test_other_types_are_families_of_their_own_or_refused() -> None:
    assert [each.name for each in OTHER_TYPES if (each.architecture in FAMILIES) == bool(each.refused)] == []


def test_there_are_all_types_of_transformers() -> None:
    if transformers.__version__ != written.found()["transformers"]:
        pytest.skip("another version of transformers")
    assert {name: row.architecture for name, row in ROWS.items()} == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
