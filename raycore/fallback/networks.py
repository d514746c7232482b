"""Makes transformers' networks: without weights, to find out what they ask for, and with those of a checkpoint."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raycore.checkpoint.weight_files import listed
from raycore.errors import InvalidCheckpoint
from raycore.fallback.library import library
from raycore.fallback.trace import Unsupported, first_line
from raycore.node.versions import warn_if_untested

REFERENCE = "eager"
"""The implementation of attention that every model of transformers has."""
_MIXERS = (nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.BatchNorm1d)
_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""Types of layers in which tokens see each other by attention to keys and values alone."""


def read_config(path: Path) -> Any:
    """Return transformers' configuration of the checkpoint in the directory `path`. Never runs code of the checkpoint.

    Raises:
        Unsupported: the installed transformers doesn't know the model, or refuses its configuration.
    """
    transformers = library()
    warn_if_untested("transformers", transformers.__version__)
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # configurations check themselves, and may raise anything
        raise Unsupported(
            f"transformers {transformers.__version__} refuses its config.json ({first_line(error)})"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise Unsupported("its weights are quantized, which only raycore's own families support")
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise Unsupported(f"transformers {transformers.__version__} has no causal language model for it")
    return config


def empty_network(config: Any) -> Any:
    """Return the network of a configuration on the device `meta`, where it has no memory.

    Raises:
        Unsupported: something in it lets tokens see each other without attention, or it can't be made.
    """
    transformers = library()
    try:
        with torch.device("meta"):
            network = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=REFERENCE)
    except Exception as error:  # models' code may raise anything
        raise Unsupported(f"transformers can't make it: {type(error).__name__}: {first_line(error)}") from error
    _check_layers(network)
    return network.eval()


def _check_layers(network: Any) -> None:
    text = network.config.get_text_config()
    if network.config.is_encoder_decoder:
        raise Unsupported("it is an encoder with a decoder")
    if network._is_stateful:
        raise Unsupported("its layers keep a state of their own beside keys and values")
    layer_types: list[str] = getattr(text, "layer_types", None) or []
    types = sorted({each for each in layer_types if each not in _LAYERS})
    if types:
        raise Unsupported(f"it has layers of type {', '.join(types)}, which do more than attend to keys and values")


def check_modules(network: Any, called: Container[nn.Module]) -> None:
    """Raise Unsupported if one of the called modules lets tokens see each other without attention."""
    for name, module in network.named_modules():
        selects = "Indexer" in type(module).__name__  # of keys, by itself
        if (selects or isinstance(module, _MIXERS)) and module in called:
            raise Unsupported(f"its {name} ({type(module).__name__}) lets tokens see each other without attention")


def load_network(path: Path, dtype: torch.dtype, dummy_seed: int | None) -> Any:
    """Return the network of the checkpoint in the directory `path` with all its weights, in the host's memory.

    `dummy_seed`: make random weights of it instead of reading any. None: read them.

    Raises:
        InvalidCheckpoint: the files lack a tensor, have one of another shape, or one that the model doesn't use.
    """
    transformers = library()
    config = read_config(path)
    if dummy_seed is not None:
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            torch.manual_seed(dummy_seed)  # pyright: ignore[reportUnknownMemberType]
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=REFERENCE
            ).eval()
    transformers.logging.disable_progress_bar()
    network, info = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation=REFERENCE,
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    problems = {
        "missing_keys": "lacks",
        "mismatched_keys": "has with other shapes",
        "unexpected_keys": "has, without use for them,",
    }
    for kind, says in problems.items():
        names = sorted(str(each) for each in info[kind])
        if names:
            raise InvalidCheckpoint(f"{path} {says} tensors of transformers' {type(network).__name__}: {listed(names)}")
    return network.eval()
