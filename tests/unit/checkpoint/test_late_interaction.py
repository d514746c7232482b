"""What the files of models of late interaction say, and errors that name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycore.checkpoint.late_interaction import read_late_interaction
from raycore.errors import InvalidCheckpoint


@pytest.mark.parametrize(
    ("file", "content", "fragment"),
    [
        ("artifact.metadata", {"query_token_id": "[Q]"}, "query_token_id='[Q]': expected a token"),
        ("artifact.metadata", {"query_maxlen": 2}, "query_maxlen=2: expected an integer, at least 3"),
        ("config_sentence_transformers.json", {"query_prefix": "?"}, "query_prefix='?': expected a token"),
        ("config_sentence_transformers.json", {"model_type": "ColBERT", "document_length": "7"}, "document_length='7'"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: dict[str, Any], fragment: str) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    tokens = {"[Q] ": 1, "[D] ": 2, "[unused0]": 3, "[unused1]": 4, "[MASK]": 5}
    with pytest.raises(InvalidCheckpoint) as raised:
        read_late_interaction(tmp_path, lambda: tokens.get)
    for each in (file, fragment):
        assert each in str(raised.value)


def no_tokenizer() -> Any:
    raise AssertionError("other checkpoints need no tokenizer")


def test_other_checkpoints_have_no_such_files(tmp_path: Path) -> None:
    assert read_late_interaction(tmp_path, no_tokenizer) is None
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: "}}))
    assert read_late_interaction(tmp_path, no_tokenizer) is None
