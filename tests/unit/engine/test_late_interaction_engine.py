"""Models of late interaction give queries and documents the embeddings of PyLate and of Stanford's ColBERT.

The references are computed with transformers, by the formulas of both: markers after the first token, queries filled up
with masks that other tokens don't see, punctuation of documents left out, a projection, and norms of 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_checkpoints import make_encoder, reference
from encoder_equality import configured
from pooled_equality import TOLERANCE, pool
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import normalize

from raycore.errors import InvalidRequest
from raycore.parts.pooling.client.pooling import resolved
from raycore.pooling_params import PoolingParams

SIZE = 24
TEXT = [0, 41, 42, 43, 44, 45, 2]
"""Special tokens and those between. 43 is skipped in documents."""


def add_tokens(path: Path, *tokens: str) -> list[int]:
    native = Tokenizer.from_file(str(path / "tokenizer.json"))
    native.add_special_tokens(list(tokens))
    native.save(str(path / "tokenizer.json"))
    return [native.token_to_id(token) for token in tokens]


def pylate(path: Path, architecture: str, **changed: Any) -> Tensor:
    """Write a checkpoint as PyLate does. Returns the projection's weight."""
    make_encoder(path, architecture)
    add_tokens(path, "[MASK]", "[Q] ", "[D] ")
    skipped = Tokenizer.from_file(str(path / "tokenizer.json")).id_to_token(43)
    settings = {"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 12}
    settings |= {"document_length": 7, "skiplist_words": [skipped], "similarity_fn_name": "MaxSim"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings | changed))
    kinds = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    modules = [
        {"idx": index, "name": str(index), "path": folder, "type": kind} for index, (folder, kind) in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Dense").mkdir()
    dense = {"in_features": 64, "out_features": SIZE, "bias": False, "use_residual": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (path / "1_Dense" / "config.json").write_text(json.dumps(dense))
    weight = torch.randn(SIZE, 64)
    save_file({"linear.weight": weight}, path / "1_Dense" / "model.safetensors")
    return weight


def stanford(path: Path) -> Tensor:
    make_encoder(path, "BertModel")
    add_tokens(path, "[MASK]", "[unused0]", "[unused1]")
    weight = torch.randn(SIZE, 64)
    stored = load_file(path / "model.safetensors")
    tensors = {f"bert.{name}": each for name, each in stored.items()} | {"linear.weight": weight}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    metadata = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 12, "doc_maxlen": 7}
    metadata |= {"mask_punctuation": True, "attend_to_mask_tokens": False, "dim": SIZE}
    (path / "artifact.metadata").write_text(json.dumps(metadata))
    return weight


def expected(network: Any, weight: Tensor, prompt: list[int], num_seen: int, skipped: list[int]) -> Tensor:
    mask = (torch.arange(len(prompt)) < num_seen).long().unsqueeze(0)
    with torch.inference_mode():
        hidden = network(torch.tensor([prompt]), attention_mask=mask).last_hidden_state[0]
    rows = [row for row, token in enumerate(prompt) if token not in skipped]
    return normalize(hidden @ weight.t(), dim=-1)[rows]


@pytest.mark.parametrize("kind", ["stanford", "BertModel", "ModernBertModel", "attended", "unexpanded"])
def test_embeddings_are_those_of_queries_and_documents(tmp_path: Path, make_core: Any, kind: str) -> None:
    path = tmp_path / "model"
    changed = {"attended": {"attend_to_expansion_tokens": True}, "unexpanded": {"do_query_expansion": False}}
    if kind == "stanford":
        weight = stanford(path)
        network = reference(make_encoder(tmp_path / "plain", "BertModel"))
    else:
        weight = pylate(path, kind if kind.endswith("Model") else "BertModel", **changed.get(kind, {}))
        network = reference(path)
    core = make_core(configured(path))
    spec = core.config.model.spec.pooling
    assert spec is not None
    assert spec.tasks == ["token_embed"]
    late = spec.late
    assert late is not None
    assert kind == "stanford" or late.skipped == [43]
    query, document = spec.prompt(TEXT, "query"), spec.prompt(TEXT, "document")
    assert query[:8] == [0, late.query_marker, *TEXT[1:]]
    assert query[8:] == ([] if kind == "unexpanded" else [late.expansion_token] * 4)
    assert document == [0, late.document_marker, 41, 42, 43, 44, 2], "cut to 7 tokens"
    # prompts of several lengths are padded and computed together
    longer = spec.prompt([0, *range(50, 58), 2], "query")
    found, _ = pool(core, "token_embed", [query, document, longer])
    for own, prompt, skipped in ((query, found[0], []), (document, found[1], late.skipped), (longer, found[2], [])):
        made = expected(network, weight, own, len(own) if kind == "attended" else late.num_seen(own), skipped)
        assert prompt.shape == made.shape
        np.testing.assert_allclose(prompt, made.numpy(), atol=10 * TOLERANCE)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_queries_are_filled_up_with_the_mask_that_a_file_names(tmp_path: Path, file: str) -> None:
    path = tmp_path / "model"
    pylate(path, "BertModel")
    (mask,) = add_tokens(path, "<|mask|>")
    (path / file).write_text(json.dumps({"mask_token": {"content": "<|mask|>"}}))
    spec = configured(path).model.spec.pooling
    assert spec is not None
    assert spec.late is not None
    assert spec.late.expansion_token == mask


def test_other_models_refuse_kinds_of_texts(tmp_path: Path) -> None:
    spec = configured(make_encoder(tmp_path)).model.spec.pooling
    assert spec is not None
    assert spec.kinds == (None, None)
    with pytest.raises(InvalidRequest, match="input_type='query', but this model treats all texts alike"):
        resolved(PoolingParams(input_type="query"), None, spec)
    bad: Any = "title"
    with pytest.raises(InvalidRequest, match="input_type='title' isn't"):
        resolved(PoolingParams(input_type=bad), None, spec)
