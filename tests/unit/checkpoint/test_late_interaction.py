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
        read_late_interaction(tmp_path, lambda: tokens.get, lambda: None)
    for each in (file, fragment):
        assert each in str(raised.value)


@pytest.mark.parametrize(
    ("file", "content", "advice"),
    [
        ("artifact.metadata", {"query_maxlen": 8}, "tokenizer_config.json"),
        ("config_sentence_transformers.json", {"model_type": "ColBERT"}, "or set do_query_expansion to false"),
    ],
)
def test_the_mask_is_the_token_that_the_tokenizer_names(
    tmp_path: Path, file: str, content: dict[str, Any], advice: str
) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    tokens = {"[Q] ": 1, "[D] ": 2, "[unused0]": 3, "[unused1]": 4, "[M]": 5, "[MASK]": 6}
    for named, token in (("[M]", 5), (None, 6)):
        late = read_late_interaction(tmp_path, lambda: tokens.get, lambda named=named: named)
        assert late is not None
        assert late.expansion_token == token
    del tokens["[MASK]"]
    with pytest.raises(InvalidCheckpoint, match="has none of \\[MASK\\], <mask>") as raised:
        read_late_interaction(tmp_path, lambda: tokens.get, lambda: None)
    assert file in str(raised.value)
    assert str(raised.value).endswith(advice)
    assert ("do_query_expansion" in str(raised.value)) == (file != "artifact.metadata")


def no_tokenizer() -> Any:
    raise AssertionError("other checkpoints need no tokenizer")


def test_other_checkpoints_have_no_such_files(tmp_path: Path) -> None:
    assert read_late_interaction(tmp_path, no_tokenizer, lambda: None) is None
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: "}}))
    assert read_late_interaction(tmp_path, no_tokenizer, lambda: None) is None
