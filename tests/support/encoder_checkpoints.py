"""Small random encoders of every family and form, made with transformers, with tokenizers as such models have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import processors
from tokenizers_for_tests import byte_level, word_piece, write

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    # wide, so that outputs of different prompts differ
    "initializer_range": 0.2,
}
ROBERTA: dict[str, Any] = {"vocab_size": 500, "max_position_embeddings": 131, "pad_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {"vocab_size": 120, "max_position_embeddings": 128, "hidden_act": "gelu"},
    "Roberta": {**ROBERTA, "type_vocab_size": 1, "hidden_act": "gelu_new"},
    "XLMRoberta": {**ROBERTA, "type_vocab_size": 1},
    "ModernBert": {
        "vocab_size": 500,
        "max_position_embeddings": 128,
        # layers 1 and 2 see 4 tokens on each side
        "local_attention": 8,
        "classifier_pooling": "mean",
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "cls_token_id": 0,
        "sep_token_id": 2,
    },
}
SPECIAL_TOKENS = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<|im_start|>"}
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
POOLINGS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def make_encoder(path: Path, architecture: str = "BertModel", **changes: Any) -> Path:
    """Write a checkpoint. `changes`: of its configuration."""
    family = next(each for each in FAMILIES if architecture.startswith(each))
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **changes})
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.2
    model.save_pretrained(path)
    _write_tokenizer(path, family)
    return path


def reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The network of a checkpoint, as transformers computes it."""
    architecture = json.loads((path / "config.json").read_text())["architectures"][0]
    # eager attention rounds less in 16 bits
    return getattr(transformers, architecture).from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def as_sentence_transformer(path: Path, pooling: str, *, normalizes: bool = True, max_length: int = 100) -> Path:
    """Add sentence-transformers' files to a checkpoint. `pooling`: one of `POOLINGS`."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalizes else [])]
    modules = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, (folder, kind) in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length, "do_lower_case": False}))
    for folder, _ in kinds[1:]:
        (path / folder).mkdir(exist_ok=True)
    size = json.loads((path / "config.json").read_text())["hidden_size"]
    config = {"word_embedding_dimension": size, **{key: name == pooling for name, key in POOLINGS.items()}}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return path


def _write_tokenizer(path: Path, family: str) -> None:
    native = word_piece() if family == "Bert" else byte_level()
    ends = [(token, native.token_to_id(token)) for token in ("<s>", "</s>")]
    # RoBERTa has two separators, and only BERT tells its two texts apart
    pair = "<s> $A </s> $B:1 </s>:1" if family == "Bert" else "<s> $A </s> </s> $B </s>"
    native.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=ends)
    names = ["input_ids", *(["token_type_ids"] if family == "Bert" else []), "attention_mask"]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names, **SPECIAL_TOKENS}
    write(path, native, config)
