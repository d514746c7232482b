"""The encoders that raycore serves, and what they pool. Does not import torch."""

from __future__ import annotations

__all__ = ["ENCODERS", "EncoderForm", "check_model_type", "encoder_form", "encoder_pooling"]

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from msgspec.structs import replace

from raycore.json_fields import JsonFields
from raycore.models.activations import read_activation
from raycore.models.bert import BERT, ROBERTA, XLM_ROBERTA
from raycore.models.family import Family
from raycore.models.modernbert import MODERNBERT
from raycore.models.spec import ModelSpec
from raycore.parts.pooling.models.forms import PoolingChoice, as_chosen, class_activation, labels_of
from raycore.parts.pooling.models.pooling import (
    ActivationName,
    HeadActivation,
    HeadLinear,
    HeadNorm,
    HeadPart,
    PoolingFiles,
    PoolingSpec,
    SequencePooling,
)

ENCODERS: Mapping[str, Family] = {
    "Bert": BERT,
    "ModernBert": MODERNBERT,
    "Roberta": ROBERTA,
    "XLMRoberta": XLM_ROBERTA,
}
"""By the beginning of the names of architectures."""
_Head = Literal["model", "sequence", "tokens"]
_HEADS: Mapping[str, _Head] = {
    "Model": "model",
    "ForMaskedLM": "model",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "tokens",
}
"""What is on top of an encoder, by the ends of those names. The head of masked language models isn't used."""

_OTHER_NAMES: Mapping[str, str] = {"HF_ColBERT": "BertModel", "ColBERT": "BertModel"}
"""Architectures whose files differ from those of another one only by what is on top."""


class EncoderForm(NamedTuple):
    """An architecture as an encoder of a family, with something on top."""

    family: Family
    head: _Head


def encoder_form(architecture: str) -> EncoderForm | None:
    """Return what an architecture is. None: it isn't an encoder that raycore has a family for."""
    architecture = _OTHER_NAMES.get(architecture, architecture)
    for stem, family in ENCODERS.items():
        head = _HEADS.get(architecture.removeprefix(stem)) if architecture.startswith(stem) else None
        if head is not None:
            return EncoderForm(family, head)
    return None


def check_model_type(architecture: str, config: JsonFields) -> None:
    """Raise InvalidCheckpoint if an architecture's name leaves open what it is on top of, and it isn't that one."""
    if architecture in _OTHER_NAMES and config.get("model_type") not in (None, "bert"):
        raise config.error("model_type", f"bert, because {architecture} is read only on top of BERT")


def encoder_pooling(spec: ModelSpec, config: JsonFields, files: PoolingFiles, choice: PoolingChoice) -> PoolingSpec:
    """Return what an encoder pools.

    Args:
        spec: of the encoder itself.
        config: config.json, with its labels.
        files: of the checkpoint's directory.

    Raises:
        InvalidCheckpoint: a file is damaged, or asks for something that isn't supported.
    """
    form = encoder_form(spec.architecture)
    assert form is not None, "the model is one of ENCODERS"
    if choice.convert == "classify" and form.head == "model":
        raise config.error("architectures", "one with a head for classes, because convert='classify'")
    if form.head == "model" or choice.convert == "embed":
        return as_chosen(_embedder(spec, files, choice), choice)
    return as_chosen(_classifier(spec, form, config, files, choice), choice)


def _embedder(spec: ModelSpec, files: PoolingFiles, choice: PoolingChoice) -> PoolingSpec:
    modules = files.modules()
    found = PoolingSpec(
        tasks=["embed", "token_embed"],
        sequence=choice.sequence or (modules.pooling if modules is not None else None) or "CLS",
        token=choice.token or "ALL",
        embedding_size=spec.hidden_size,
        pairs="pair",
        max_length=files.max_length(),
    )
    if modules is None:
        return found
    size = modules.embedding_size or spec.hidden_size
    return replace(found, embed=modules.head, embedding_size=size, use_activation=modules.is_normalized)


def _classifier(
    spec: ModelSpec, form: EncoderForm, config: JsonFields, files: PoolingFiles, choice: PoolingChoice
) -> PoolingSpec:
    labels = labels_of(config)
    parts, sequence = _head(spec, form, config, len(labels))
    activation = class_activation(config, len(labels))
    found = PoolingSpec(
        tasks=["token_classify"],
        sequence=choice.sequence or sequence,
        token=choice.token or "ALL",
        token_classify=parts,
        embedding_size=spec.hidden_size,
        class_activation=activation,
        token_class_activation=activation,
        num_labels=len(labels),
        labels=labels,
        pairs="pair",
        max_length=files.max_length(),
    )
    if form.head == "tokens":
        return found
    tasks = ["classify", "score"] if len(labels) == 1 else ["classify"]
    return replace(found, tasks=tasks, classify=parts, token_classify=[])


def _head(
    spec: ModelSpec, form: EncoderForm, config: JsonFields, num_labels: int
) -> tuple[list[HeadPart], SequencePooling]:
    """Return the head for classes, and which hidden states it gets."""
    hidden, root = spec.hidden_size, spec.names.roots.model
    last = HeadLinear("classifier.weight", num_labels, hidden, "classifier.bias")
    if form.family is MODERNBERT:
        assert spec.encoder is not None, "it is an encoder"
        config = config.with_defaults(form.family.defaults)
        parts: list[HeadPart] = [
            HeadLinear("head.dense.weight", hidden, hidden),
            HeadActivation(read_activation(config, "classifier_activation", get_args(ActivationName))),
            HeadNorm("head.norm.weight", hidden, spec.encoder.norm_eps, _norm_bias(spec)),
            last,
        ]
        return parts, _classifier_pooling(config)
    if form.head == "tokens":
        return [last], "CLS"
    if form.family is BERT:
        return [HeadLinear(f"{root}pooler.dense.weight", hidden, hidden), HeadActivation("tanh"), last], "CLS"
    out = HeadLinear("classifier.out_proj.weight", num_labels, hidden)
    return [HeadLinear("classifier.dense.weight", hidden, hidden), HeadActivation("tanh"), out], "CLS"


def _norm_bias(spec: ModelSpec) -> str | None:
    return "head.norm.bias" if spec.encoder is not None and spec.encoder.has_norm_bias else None


def _classifier_pooling(config: JsonFields) -> SequencePooling:
    poolings: Mapping[str, SequencePooling] = {"cls": "CLS", "mean": "MEAN"}
    name = config.get("classifier_pooling")
    if name not in poolings:
        raise config.error("classifier_pooling", f"one of {', '.join(poolings)}")
    return poolings[name]
