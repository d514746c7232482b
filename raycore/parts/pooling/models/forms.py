"""Which architectures pool, and what a decoder of one of raycore's families pools. Does not import torch."""

from __future__ import annotations

__all__ = [
    "PoolingChoice",
    "PoolingForm",
    "as_chosen",
    "class_activation",
    "decoder_pooling",
    "labels_of",
    "pooling_form",
]

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields
from raycore.models.spec import ModelSpec
from raycore.parts.pooling.models.late_interaction import LateInteraction
from raycore.parts.pooling.models.pooling import (
    HeadActivation,
    HeadLinear,
    HeadPart,
    HeadRows,
    Normalization,
    PoolingFiles,
    PoolingSpec,
    SequencePooling,
    TokenPooling,
)
from raycore.pooling_params import PoolingTask

Form = Literal["generate", "model", "sequence", "tokens", "reward", "process_reward"]
"""What is on top of a decoder: a head for texts, nothing, or a head for classes of texts, of tokens, or for rewards."""

_SUFFIXES: Mapping[str, Form] = {
    "ForCausalLM": "generate",
    "LMHeadModel": "generate",
    "ChatModel": "generate",
    "ForConditionalGeneration": "generate",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "tokens",
    "ForProcessRewardModel": "process_reward",
    "ForRewardModel": "reward",
    "TextModel": "model",
    "Model": "model",
}
"""By the ends of architectures' names, longer ones before their own ends."""
_STEMS = {"Gemma3Text": "Gemma3"}
"""Stems that differ from those of models that generate."""


class PoolingForm(NamedTuple):
    """An architecture as a decoder of a family, with something on top."""

    base: str
    """The architecture of the family's models that generate."""
    form: Form


class PoolingChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What users ask a pooling model for, in place of what its checkpoint says."""

    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    task: PoolingTask | None = None
    """The default task. None: the model's first one."""
    sequence: SequencePooling | None = None
    token: TokenPooling | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    late: LateInteraction | None = None
    """What the checkpoint wants of queries and documents."""
    class_tokens: list[int] | None = None
    """The ids of the tokens of `classifier_from_token` in config.json."""


def pooling_form(architecture: str) -> PoolingForm | None:
    """Return what an architecture is, by its name. None: it has none of the usual names."""
    for suffix, form in _SUFFIXES.items():
        if architecture.endswith(suffix) and len(architecture) > len(suffix):
            stem = architecture.removesuffix(suffix)
            ending = suffix if form == "generate" else "ForCausalLM"
            return PoolingForm(_STEMS.get(stem, stem) + ending, form)
    return None


def decoder_pooling(
    spec: ModelSpec, form: Form, config: JsonFields, files: PoolingFiles, choice: PoolingChoice
) -> PoolingSpec:
    """Return what a decoder pools.

    Args:
        spec: of the decoder itself.
        config: config.json, with its labels.
        files: of the checkpoint's directory.

    Raises:
        InvalidCheckpoint: a file is damaged, or asks for something that isn't supported.
    """
    if config.get("use_bidirectional_attention"):
        raise config.error("use_bidirectional_attention", "false, because decoders' tokens see only those before them")
    if config.get("is_causal") is False:
        raise config.error("is_causal", "true, because decoders' tokens see only those before them")
    modules = files.modules()
    classifies = choice.convert == "classify" or (choice.convert != "embed" and form not in ("generate", "model"))
    if choice.returned_token_ids is not None and form == "generate" and choice.convert == "auto":
        classifies = True
    if not classifies and choice.late is not None:
        _check_expansion(config, choice.late)
    size, tasks = spec.hidden_size, _tasks(form, classifies=classifies)
    labels = labels_of(config)
    found = PoolingSpec(
        tasks=tasks,
        sequence=choice.sequence or (modules.pooling if modules is not None else None) or "LAST",
        token=choice.token or ("STEP" if form == "process_reward" else "ALL"),
        embed=[] if modules is None or classifies else modules.head,
        embedding_size=size if modules is None or classifies else modules.embedding_size or size,
        use_activation=True if modules is None or classifies else modules.is_normalized,
        is_matryoshka=config.bool_("is_matryoshka") or bool(config.list_("matryoshka_dimensions")),
        matryoshka_dimensions=config.list_("matryoshka_dimensions") or None,
        max_length=files.max_length(),
    )
    if classifies:
        found = _with_classifier(found, spec, form, config, labels, choice)
    return as_chosen(found, choice)


def _check_expansion(config: JsonFields, late: LateInteraction) -> None:
    if late.expansion_token is not None and not late.attends_to_expansion:
        raise InvalidCheckpoint(
            f"{config.source} is that of a decoder, whose tokens see all before them, and queries are filled up with "
            "masks that no token is to see: only encoders do so. Expected attend_to_expansion_tokens=true or "
            "do_query_expansion=false in config_sentence_transformers.json, or attend_to_mask_tokens=true in "
            "artifact.metadata"
        )


def _tasks(form: Form, *, classifies: bool) -> list[PoolingTask]:
    if not classifies:
        return ["embed", "token_embed"]
    return ["classify", "token_classify"] if form in ("sequence", "generate", "model") else ["token_classify"]


def _with_classifier(
    found: PoolingSpec, spec: ModelSpec, form: Form, config: JsonFields, labels: list[str], choice: PoolingChoice
) -> PoolingSpec:
    head, num_labels, pairs = _classifier(spec, form, config, len(labels), choice)
    tasks = [*found.tasks, "score"] if num_labels == 1 and "classify" in found.tasks else found.tasks
    one = class_activation(config, num_labels)
    return msgspec.structs.replace(
        found,
        tasks=tasks,
        classify=head,
        token_classify=head,
        class_activation=one,
        token_class_activation=one,
        num_labels=num_labels,
        labels=labels if len(labels) == num_labels else [],
        pairs=pairs,
    )


def _classifier(
    spec: ModelSpec, form: Form, config: JsonFields, num_labels: int, choice: PoolingChoice
) -> tuple[list[HeadPart], int, Literal["pair", "text"]]:
    """Return the head, its number of classes, and how pairs of texts become prompts."""
    hidden = spec.hidden_size
    pairs = "pair" if config.bool_("use_sep_token", default=choice.class_tokens is None) else "text"
    tokens = choice.class_tokens or (choice.returned_token_ids if form == "generate" else None)
    if tokens is not None:
        is_difference = choice.class_tokens is not None and _is_two_way(config)
        rows = HeadRows(
            "embedding" if spec.tie_word_embeddings else "head", spec.vocab_size, hidden, tokens, is_difference
        )
        return [rows], rows.num_outputs, pairs
    if form in ("reward", "process_reward"):
        num_labels = 1 if form == "reward" else 2
        first = HeadLinear("score.0.weight", hidden, hidden, "score.0.bias")
        return (
            [first, HeadActivation("relu"), HeadLinear("score.2.weight", num_labels, hidden, "score.2.bias")],
            (num_labels),
            pairs,
        )
    bias = "score.bias" if form == "tokens" else None
    return [HeadLinear("score.weight", num_labels, hidden, bias)], num_labels, pairs


def _is_two_way(config: JsonFields) -> bool:
    """Whether the class is how likely the second of two tokens is, instead of a class for each token."""
    if config.get("method") is None:
        return config.bool_("is_original_qwen3_reranker") or len(config.list_("classifier_from_token") or []) == 2
    return config.get("method") == "from_2_way_softmax"


def class_activation(config: JsonFields, num_labels: int) -> Normalization:
    """Return what makes probabilities of logits, as config.json says.

    Source: transformers' losses by `problem_type`, and what sentence-transformers' cross encoders write.
    """
    problem = config.get("problem_type")
    if problem is not None:
        known: Mapping[str, Normalization] = {
            "regression": "none",
            "single_label_classification": "softmax" if num_labels > 1 else "sigmoid",
            "multi_label_classification": "sigmoid",
        }
        if problem not in known:
            raise config.error("problem_type", f"one of {', '.join(known)}")
        return known[problem]
    named = config.child("sentence_transformers").get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function")
    usual: Normalization = "softmax" if num_labels > 1 else "sigmoid"
    if named is None:
        return usual
    name = str(named).rsplit(".", 1)[-1]
    activations: Mapping[str, Normalization] = {
        "Identity": "none",
        "Sigmoid": usual,
        "Softmax": usual,
        "Tanh": "tanh",
    }
    if name not in activations:
        raise config.error("sentence_transformers", f"an activation_fn that is one of {', '.join(activations)}")
    return activations[name]


def labels_of(config: JsonFields) -> list[str]:
    """Return the names of the classes, as many as there are."""
    named = config.child("id2label").values
    if named:
        try:
            return [str(named[key]) for key in sorted(named, key=int)]
        except ValueError:
            raise config.error("id2label", "an object with the classes' names by number") from None
    return [f"LABEL_{index}" for index in range(config.optional_int("num_labels") or 2)]


def as_chosen(found: PoolingSpec, choice: PoolingChoice) -> PoolingSpec:
    """Return the description with what users ask for, and with what a checkpoint of late interaction wants."""
    if choice.late is not None and "token_embed" in found.tasks:
        found = _with_late(found, choice.late)
    fields = ("use_activation", "dimensions", "logit_mean", "logit_sigma", "step_tag_id", "returned_token_ids")
    given = {name: getattr(choice, name) for name in fields if getattr(choice, name) is not None}
    if found.classify and isinstance(found.classify[0], HeadRows):
        given.pop("returned_token_ids", None)  # the head has only those
    if choice.task is not None and choice.task in found.tasks:
        given["tasks"] = [choice.task, *(task for task in found.tasks if task != choice.task)]
    return msgspec.structs.replace(found, **given)


def _with_late(found: PoolingSpec, late: LateInteraction) -> PoolingSpec:
    """Each token has a normalized embedding. Longer texts than the model was made for are cut, not refused."""
    found = msgspec.structs.replace(found, late=late, tasks=["token_embed"], use_activation=True, max_length=None)
    if late.projected_size is None:
        return found
    head = HeadLinear("linear.weight", late.projected_size, found.embedding_size)
    return msgspec.structs.replace(found, embed=[head], embedding_size=late.projected_size)
