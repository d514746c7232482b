"""The options of the model, and of how it is loaded."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.checkpoint.sharded_state import Division, checked_pattern
from raycore.errors import InvalidConfig
from raycore.models.spec import ModelSpec
from raycore.options.declared import json_object, json_option, option
from raycore.options.numbers import whole_number

DType = Literal["float32", "bfloat16", "float16"]


LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


def _path(path: str | os.PathLike[str]) -> str:
    return path if isinstance(path, str) else os.fspath(path)


AUTO_LENGTH = -1
"""`max_model_len="auto"`."""


def _length(value: int | str) -> int:
    length = AUTO_LENGTH if value in ("auto", AUTO_LENGTH, str(AUTO_LENGTH)) else whole_number(value)
    if length == 0:
        raise TypeError(value)
    return length


def _load_format(value: str) -> str:
    # vLLM's ways of reading safetensors files, of which raycore has its own
    ways = ("safetensors", "hf", "fastsafetensors", "instanttensor", "runai_streamer")
    return "auto" if value in ways else value


def _dtype_name(dtype: str | Any) -> str:
    """Convert a dtype, given as a `torch.dtype` or by one of torch's names, to the name that the option accepts.

    For example, `torch.float32` and `"float"` become `"float32"`.
    """
    name = str(dtype).removeprefix("torch.")
    return {"float": "float32", "half": "float16"}.get(name, name)


def parse_loader_config(value: str | dict[str, Any] | None) -> dict[str, str] | None:
    """Convert the option `model_loader_extra_config`, a dict or a JSON object. Only its key `pattern` is known.

    Raises:
        InvalidConfig: it has other keys, or the pattern can't be used.
    """
    if not value:
        return None
    found = json_object("model_loader_extra_config", value)
    if found.keys() - {"pattern"}:
        raise InvalidConfig(f"model_loader_extra_config={value!r} has other keys than 'pattern'")
    pattern = found.get("pattern")
    return None if pattern is None else {"pattern": checked_pattern(pattern, Division(1))}


def parse_overrides(value: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """Convert the option `hf_overrides`, a dict or a JSON object.

    Raises:
        InvalidConfig: it is neither, such as a function, or has values that JSON hasn't.
    """
    if not value:
        return None
    found = json_object("hf_overrides", value)
    try:
        return msgspec.json.decode(msgspec.json.encode(found))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidConfig(f"hf_overrides={value!r} isn't a JSON object: {error}") from None


def _generation_overrides(value: str | dict[str, Any] | None) -> dict[str, Any] | None:
    return json_object("override_generation_config", value) if value else None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The model and how it is loaded. Paths are absolute. `spec` holds what the checkpoint's config.json describes."""

    model: Annotated[
        str,
        option(
            "Directory of a Hugging Face checkpoint, or GGUF file, whose path is the same on all nodes. Or its name on "
            "the hub, from where it is downloaded into the cache of each node that lacks it.",
            metavar="DIR",
            default="the bundled model",
            convert=_path,
            is_common=True,
        ),
    ]
    tokenizer: Annotated[
        str,
        option(
            "Directory of the tokenizer, or its name on the hub, or a GGUF file.",
            metavar="DIR",
            default="the model's",
            convert=_path,
        ),
    ]
    spec: ModelSpec
    skip_tokenizer_init: Annotated[
        bool,
        option(
            "Load no tokenizer. Prompts must then be token ids, and outputs have no text. What needs text is refused: "
            "stop strings, conversations, structured outputs."
        ),
    ] = False
    tokens_only: Annotated[bool, option("The same as `skip_tokenizer_init`, under vLLM's name for servers.")] = False
    revision: Annotated[
        str | None,
        option("The branch, tag or commit of a model that is named as on the hub.", default="main"),
    ] = None
    tokenizer_revision: Annotated[
        str | None,
        option("The branch, tag or commit of a tokenizer that is named as on the hub.", default="main"),
    ] = None
    download_dir: Annotated[
        str | None,
        option(
            "Directory of the Hugging Face cache where models are looked up, and downloaded to.",
            metavar="DIR",
            default="that of the variables HF_HUB_CACHE and HF_HOME",
        ),
    ] = None
    model_impl: Annotated[
        Literal["auto", "raycore", "transformers"],
        option(
            "Whose code computes the model's layers. raycore: one of raycore's families. transformers: transformers' "
            "modelling code with raycore's attention and linear layers, which is slower, and knows many more "
            "architectures; it needs the extra `transformers`. auto: raycore's family where there is one, else "
            "transformers."
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto"] | DType,
        option(
            "Data type of weights and activations. auto: the checkpoint's data type. If the first rank's device has no "
            "instructions for that, all ranks use float32 on CPUs and float16 on GPUs.",
            convert=_dtype_name,
            is_common=True,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int,
        Meta(ge=AUTO_LENGTH),
        option(
            "Maximum length of a sequence in tokens: prompt and output together. 4k is 4000, and 4K is 4096. auto, or "
            "-1: the checkpoint's maximum, or as much of it as the KV cache holds, which the log says.",
            default="the checkpoint's maximum",
            expected="a positive integer, also as 4k or 4K, 'auto' or -1",
            convert=_length,
            is_common=True,
        ),
    ]
    seed: Annotated[
        int,
        Meta(ge=-(2**63), le=2**63 - 1),
        option(
            "Requests without a seed get different seeds, which are derived from this one.",
            flags=("--seed", "--engine-seed"),
            expected="a 64-bit integer",
        ),
    ] = 0
    enforce_eager: Annotated[
        bool,
        option(
            "On a GPU: launch every kernel of a step by itself, instead of capturing the steps that only decode in "
            "CUDA graphs. Slower, and takes less memory."
        ),
    ] = False
    attention_backend: Annotated[
        Literal["auto", "triton", "native", "torch"],
        option(
            "What computes attention, and the operations around it. triton: raycore's kernels for GPUs. native: "
            "raycore's kernels for CPUs. torch: plain PyTorch, on any device, slower. auto: the fastest of these that "
            "can be used. Where only the model's attention has a part that kernels lack, the operations around it keep "
            "theirs."
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy", "sharded_state", "gguf"],
        option(
            "auto: read the weights from the checkpoint. dummy: use random weights, generated from the engine's seed. "
            "sharded_state: read the files that save_sharded_state() has written, with the same parallel sizes. "
            "gguf: auto, and the model has to be a GGUF file. "
            "Other names of vLLM for ways to read safetensors files mean auto.",
            convert=_load_format,
        ),
    ] = "auto"
    model_loader_extra_config: Annotated[
        dict[str, str] | None,
        json_option(
            'With load_format=sharded_state: {"pattern": "..."} if the files were saved with another pattern.',
            convert=parse_loader_config,
        ),
    ] = None
    quantization: Annotated[
        Literal["fp8", "int8", "gguf", "awq", "gptq", "compressed-tensors", "mxfp4", "modelopt", "fbgemm_fp8"] | None,
        option(
            "fp8: the weights of linear layers are rounded to 8 bits while they are loaded, and activations while they "
            "are computed. This halves the weights' memory. It needs a GPU with compute capability 8.9 or more, and "
            "can't be used with batch_invariant. int8: the same with integers, on CPUs, with the native kernels. "
            "fp8 isn't for mixture-of-experts models. Embeddings, routers and the head keep the data type. "
            "Quantized checkpoints need no option: weights are kept as they are where the device computes with them "
            "(fp8 on GPUs and CPUs, integers on CPUs), and converted to the data type elsewhere. The other values only "
            "say how the checkpoint is quantized, which is checked.",
            flags=("-q", "--quantization"),
        ),
    ] = None
    cpu_activation_dtype: Annotated[
        Literal["auto", "int8"],
        option(
            "What the inputs of layers are rounded to whose weights are stored in integers (GGUF's quantized types, "
            "compressed-tensors, GPTQ, AWQ and MXFP4), on CPUs with the native kernels. auto: integers of 16 bits, or "
            "of 8 if the checkpoint was made for that. int8: integers of 8 bits, with a scale for each 32 inputs of a "
            "token, for small errors in the logits. Steps with many tokens are faster on processors with VNNI, and "
            "with 4-bit weights on all with AVX2. Elsewhere they aren't."
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        option(
            "Make a token's logits bitwise independent of the other requests in its batch, of prefix caching and of "
            "preemption. Slower."
        ),
    ] = False
    logprobs_mode: Annotated[
        LogprobsMode,
        option(
            "What requests with logprobs get. raw_logprobs: log probabilities by the model's own logits. "
            "processed_logprobs: by those that the token is picked from, after penalties, temperature, top_k, top_p "
            "and all other sampling parameters. raw_logits and processed_logits: these logits themselves. Those of "
            "prompts are always raw."
        ),
    ] = "raw_logprobs"
    max_logprobs: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        option(
            "Maximum number of log probabilities per token that a request may ask for, by logprobs, top_logprobs and "
            "prompt_logprobs. -1: as many as the vocabulary has tokens.",
            default="20 for HTTP requests, and no maximum in Python",
        ),
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | None,
        json_option(
            "What counts instead of values in the checkpoint's config.json. Objects are merged.",
            convert=parse_overrides,
        ),
    ] = None
    hf_config_path: Annotated[
        str | None,
        option(
            "Directory, or name on the hub, whose config.json and generation_config.json describe the model.",
            metavar="DIR",
            default="the model's",
        ),
    ] = None
    enable_prompt_embeds: Annotated[
        bool,
        option(
            "Let requests give the embeddings of a prompt's tokens instead of tokens. They change what the model sees "
            "at will."
        ),
    ] = False
    generation_config: Annotated[
        str,
        option(
            "Where defaults of sampling parameters come from. auto: the checkpoint's generation_config.json. vllm: "
            "nowhere, so those of SamplingParams count. Else a directory with a generation_config.json.",
            metavar="DIR",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | None,
        json_option(
            'Defaults of sampling parameters that count instead of those of generation_config: {"temperature": 0.5}.',
            convert=_generation_overrides,
        ),
    ] = None
    prepare_structured_outputs: Annotated[
        bool,
        option(
            "Load what structured outputs need at startup. Otherwise the first request that uses them stalls the "
            "processes that handle it, with all their requests, for a second or two if the vocabulary is large."
        ),
    ] = False

    @property
    def max_http_logprobs(self) -> int:
        """`max_logprobs` for HTTP requests. -1: no maximum."""
        most = 20 if self.max_logprobs is None else self.max_logprobs
        return -1 if most >= self.spec.vocab_size else most

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """The sampling parameters that the checkpoint's generation_config.json sets, as far as vLLM reads them, by
        their names in `SamplingParams`."""
        known = dict(self.spec.generation_defaults)
        if "max_new_tokens" in known:
            known["max_tokens"] = known.pop("max_new_tokens")
        return known
