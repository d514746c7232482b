"""The options of models that pool: whether a model pools, and what. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.checkpoint.late_interaction import read_late_interaction
from raycore.checkpoint.model_spec import pools_by_itself
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.json_fields import JsonFields
from raycore.options.declared import json_object, json_option, option, settings_of
from raycore.options.vllm_options import ANY, VllmOption, without_effect
from raycore.parts.pooling.models.forms import PoolingChoice
from raycore.parts.pooling.models.pooling import PoolingSpec, SequencePooling, TokenPooling
from raycore.pooling_params import PoolingTask

Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]
Task = Literal["auto", "generate", "embed", "embedding", "classify", "score", "reward"]

_TASKS: Mapping[str, tuple[Runner, Convert]] = {
    "auto": ("auto", "auto"),
    "generate": ("generate", "none"),
    "embed": ("pooling", "embed"),
    "embedding": ("pooling", "embed"),
    "classify": ("pooling", "classify"),
    "score": ("pooling", "classify"),
    "reward": ("pooling", "auto"),
}
"""What `task` of older versions of vLLM means."""


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """vLLM's settings of pooling, under vLLM's names. None: as the checkpoint says."""

    task: PoolingTask | None = None
    """The task of requests that name none."""
    pooling_type: SequencePooling | TokenPooling | None = None
    """The same as `seq_pooling_type` or `tok_pooling_type`, as its value says."""
    seq_pooling_type: SequencePooling | None = None
    """What one result is computed from: the hidden state of the last token (LAST) or of the first one (CLS), or the
    mean of all (MEAN)."""
    tok_pooling_type: TokenPooling | None = None
    """Which tokens have results: all (ALL), or those with the id `step_tag_id` (STEP)."""
    use_activation: bool | None = None
    """Whether embeddings are normalized, and logits of classes become probabilities or scores."""
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """How many elements of embeddings are kept, the first ones."""
    logit_mean: float | None = None
    """Subtracted from logits before the activation."""
    logit_sigma: float | None = None
    """Logits are divided by it after that."""
    step_tag_id: Annotated[int, Meta(ge=0)] | None = None
    returned_token_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    """The tokens whose logits are the classes of a model that generates. Of a model with classes: their numbers."""


_OLD_NAMES = {"normalize": "use_activation", "activation": "use_activation", "softmax": "use_activation"}
_OLD_NAMES["logit_bias"] = "logit_mean"
"""What older versions of vLLM call settings."""
_LENGTHS = "longer prompts are refused: use truncate_prompt_tokens"
_WITHOUT_EFFECT = (
    VllmOption("enable_chunked_processing", (False,), _LENGTHS),
    VllmOption("max_embed_len", (None,), _LENGTHS),
    VllmOption("enable_flash_late_interaction", (ANY,), "it has no effect"),
)


def parse_pooler_config(value: str | dict[str, Any] | PoolerConfig | None) -> PoolerConfig | None:
    """Convert what users pass.

    Raises:
        InvalidConfig: the value isn't a JSON object, or a setting is unknown, invalid or unsupported.
    """
    if value is None:
        return None
    fields = msgspec.to_builtins(value) if isinstance(value, PoolerConfig) else json_object("pooler_config", value)
    given: dict[str, Any] = {}
    for name, each in without_effect("pooler_config", fields, _WITHOUT_EFFECT).items():
        new = _OLD_NAMES.get(name, name)
        if new in given and given[new] != each:
            raise InvalidConfig(f"pooler_config: {name}={each!r} contradicts {new}={given[new]!r}: omit one of them")
        given[new] = each
    if isinstance(given.get("pooling_type"), str):
        given["pooling_type"] = given["pooling_type"].upper()
    config = settings_of("pooler_config", given, PoolerConfig)
    if config.logit_sigma == 0:
        raise InvalidConfig("pooler_config: logit_sigma=0, but logits are divided by it: give another number")
    if config.pooling_type is not None:
        kind = "tok_pooling_type" if config.pooling_type in ("ALL", "STEP") else "seq_pooling_type"
        if getattr(config, kind) not in (None, config.pooling_type):
            raise InvalidConfig(
                f"pooler_config: pooling_type={config.pooling_type!r} contradicts {kind}={getattr(config, kind)!r}: "
                "omit one of them"
            )
        config = msgspec.structs.replace(config, **{kind: config.pooling_type, "pooling_type": None})
    return config


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine generates or pools, and what it pools. What follows from that is in `ModelSpec.pooling`."""

    runner: Annotated[
        Runner,
        option(
            "generate: prompts are continued. pooling: prompts become embeddings, classes or scores. auto: what the "
            "checkpoint is for: pooling if it has sentence-transformers' files, or an architecture without a head for "
            "texts, such as Qwen3Model or Qwen3ForSequenceClassification."
        ),
    ] = "auto"
    convert: Annotated[
        Convert,
        option(
            "What a model that pools gives: embed, embeddings; classify, classes. auto, none: what its architecture is "
            "for."
        ),
    ] = "auto"
    task: Annotated[
        Task,
        option("runner and convert under the name that older versions of vLLM have: embed, classify, score or reward."),
    ] = "auto"
    pooler_config: Annotated[
        PoolerConfig | None,
        json_option(
            "How a model pools, if not as its checkpoint says. Keys as in vLLM: pooling_type, seq_pooling_type (LAST, "
            "MEAN or CLS), tok_pooling_type (ALL or STEP), use_activation, dimensions, logit_mean, logit_sigma, "
            "step_tag_id, returned_token_ids and task.",
            convert=parse_pooler_config,
        ),
    ] = None
    override_pooler_config: Annotated[
        PoolerConfig | None,
        json_option(
            "The same as pooler_config, under an older name.",
            convert=parse_pooler_config,
        ),
    ] = None

    @property
    def settings(self) -> PoolerConfig:
        """The settings of pooling, checked."""
        return parse_pooler_config(self.pooler_config or self.override_pooler_config) or PoolerConfig()


def choose_pooling(options: PoolingConfig, path: Path, config: JsonFields, tokenizer: Path) -> PoolingChoice | None:
    """Return what the model in the directory `path` is to pool. None: it generates.

    Args:
        config: its config.json.
        tokenizer: the tokenizer's directory.

    Raises:
        InvalidConfig: options contradict each other.
    """
    runner, convert = _runner_and_convert(options)
    if runner == "auto":
        asks = convert in ("embed", "classify")
        runner = "pooling" if asks or pools_by_itself(path, config) else "generate"
    if options.pooler_config is not None and options.override_pooler_config is not None:
        raise InvalidConfig("pooler_config and override_pooler_config are the same: omit the latter")
    if runner == "generate":
        _refuse_pooling(options, convert)
        return None
    settings = options.settings
    return PoolingChoice(
        convert=convert,
        task=settings.task or ("score" if options.task == "score" else None),
        sequence=settings.seq_pooling_type,
        token=settings.tok_pooling_type,
        use_activation=settings.use_activation,
        dimensions=settings.dimensions,
        logit_mean=settings.logit_mean,
        logit_sigma=settings.logit_sigma,
        step_tag_id=settings.step_tag_id,
        returned_token_ids=settings.returned_token_ids,
        class_tokens=_class_tokens(config, tokenizer),
        late=read_late_interaction(path, partial(_token_ids, tokenizer), partial(_mask_token, tokenizer)),
    )


def _runner_and_convert(options: PoolingConfig) -> tuple[Runner, Convert]:
    runner, convert = _TASKS[options.task]
    for name, given, implied in (("runner", options.runner, runner), ("convert", options.convert, convert)):
        if options.task != "auto" and given not in ("auto", implied):
            raise InvalidConfig(
                f"{name}={given!r} contradicts task={options.task!r}, which means {name}={implied!r}: omit one of them"
            )
    return (
        options.runner if options.runner != "auto" else runner,
        options.convert if options.convert != "auto" else convert,
    )


def _refuse_pooling(options: PoolingConfig, convert: Convert) -> None:
    given = options.pooler_config or options.override_pooler_config
    if convert in ("embed", "classify"):
        raise InvalidConfig(f"convert={convert!r} needs runner='pooling', and this engine generates: omit it")
    if given is not None and given != PoolerConfig():
        raise InvalidConfig(
            "pooler_config is for models that pool, and this engine generates: omit it, or give runner='pooling'"
        )


def _class_tokens(config: JsonFields, tokenizer: Path) -> list[int] | None:
    """Return the ids of the tokens in config.json's `classifier_from_token`. None: there are none."""
    names = config.list_("classifier_from_token") or config.child("text_config").list_("classifier_from_token")
    if not names:
        return None
    ids = list(map(_token_ids(tokenizer), map(str, names)))
    unknown = [name for name, token_id in zip(names, ids, strict=True) if token_id is None]
    if unknown:
        raise InvalidCheckpoint(
            f"{config.source}: classifier_from_token has {unknown[0]!r}, which isn't a token of the tokenizer in "
            f"{tokenizer}"
        )
    return [token_id for token_id in ids if token_id is not None]


def _token_ids(tokenizer: Path) -> Callable[[str], int | None]:
    """Return what finds the ids of tokens of the tokenizer in a directory."""
    from raycore.text.tokenizer_files import read_tokenizer_files  # imported lazily, because few models need it

    return read_tokenizer_files(tokenizer).native.token_to_id


def _mask_token(tokenizer: Path) -> str | None:
    from raycore.text.tokenizer_files import read_named_token  # imported lazily, because few models need it

    return read_named_token(tokenizer, "mask_token")


def check_pooling(chosen: Mapping[str, Any], pooling: PoolingSpec | None, num_context_parts: int) -> None:
    """Check which other options a model that pools can't have.

    `num_context_parts`: the option `prefill_context_parallel_size`.
    """
    if pooling is None:
        return
    asked = {
        "speculative_config": chosen.get("speculative_config") is not None,
        "prepare_structured_outputs": bool(chosen.get("prepare_structured_outputs")),
        "load_format": chosen.get("load_format") == "sharded_state",
        "model_impl": chosen.get("model_impl") == "transformers",
        "prefill_context_parallel_size": num_context_parts > 1,
    }
    for name in [name for name, is_asked in asked.items() if is_asked]:
        raise InvalidConfig(
            f"{name}={chosen.get(name)!r} can't be used with a model that pools: omit it, or give runner='generate'"
        )
