"""Writes `docs/vllm_0_32.json`: the names and defaults of an installed vLLM, which `docs/write_compatibility.py` reads.

python docs/vllm_inventory.py --peer-python PEER/bin/python

Everything is asked of vLLM's own objects: classes, argument parsers, the routes of the server's application and the
models of their bodies. Only the metrics are read from the source files, because they are made while an engine runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("vllm_0_32.json")
CLASSES = {
    "LLM": "vllm.LLM",
    "LLMEngine": "vllm.LLMEngine",
    "AsyncLLM": "vllm.v1.engine.async_llm.AsyncLLM",
    "EngineArgs": "vllm.EngineArgs",
    "AsyncEngineArgs": "vllm.AsyncEngineArgs",
    "SamplingParams": "vllm.SamplingParams",
    "StructuredOutputsParams": "vllm.sampling_params.StructuredOutputsParams",
    "RepetitionDetectionParams": "vllm.sampling_params.RepetitionDetectionParams",
    "BeamSearchParams": "vllm.sampling_params.BeamSearchParams",
    "RequestOutputKind": "vllm.sampling_params.RequestOutputKind",
    "PoolingParams": "vllm.PoolingParams",
    "LoRARequest": "vllm.lora.request.LoRARequest",
    "TextPrompt": "vllm.TextPrompt",
    "TokensPrompt": "vllm.TokensPrompt",
    "EmbedsPrompt": "vllm.inputs.EmbedsPrompt",
    "RequestOutput": "vllm.RequestOutput",
    "CompletionOutput": "vllm.CompletionOutput",
    "Logprob": "vllm.logprobs.Logprob",
    "FlatLogprobs": "vllm.logprobs.FlatLogprobs",
    "BeamSearchOutput": "vllm.entrypoints.generate.beam_search.utils.BeamSearchOutput",
    "BeamSearchSequence": "vllm.entrypoints.generate.beam_search.utils.BeamSearchSequence",
    "PoolingRequestOutput": "vllm.PoolingRequestOutput",
    "PoolingOutput": "vllm.PoolingOutput",
    "EmbeddingRequestOutput": "vllm.EmbeddingRequestOutput",
    "EmbeddingOutput": "vllm.EmbeddingOutput",
    "ClassificationRequestOutput": "vllm.ClassificationRequestOutput",
    "ClassificationOutput": "vllm.ClassificationOutput",
    "ScoringRequestOutput": "vllm.ScoringRequestOutput",
    "ScoringOutput": "vllm.ScoringOutput",
    "RequestStateStats": "vllm.v1.metrics.stats.RequestStateStats",
    "PoolerConfig": "vllm.config.PoolerConfig",
    "KVTransferConfig": "vllm.config.KVTransferConfig",
    "KVEventsConfig": "vllm.config.KVEventsConfig",
    "ECTransferConfig": "vllm.config.ECTransferConfig",
    "ProfilerConfig": "vllm.config.ProfilerConfig",
    "StructuredOutputsConfig": "vllm.config.StructuredOutputsConfig",
    "SpeculativeConfig": "vllm.config.SpeculativeConfig",
    "LogitsProcessor": "vllm.v1.sample.logits_processor.LogitsProcessor",
    "AdapterLogitsProcessor": "vllm.v1.sample.logits_processor.AdapterLogitsProcessor",
    "BatchUpdate": "vllm.v1.sample.logits_processor.BatchUpdate",
    "MoveDirectionality": "vllm.v1.sample.logits_processor.MoveDirectionality",
    "Counter": "vllm.v1.metrics.reader.Counter",
    "Gauge": "vllm.v1.metrics.reader.Gauge",
    "Histogram": "vllm.v1.metrics.reader.Histogram",
    "Vector": "vllm.v1.metrics.reader.Vector",
    "KVEventBatch": "vllm.distributed.kv_events.KVEventBatch",
    "BlockStored": "vllm.distributed.kv_events.BlockStored",
    "BlockRemoved": "vllm.distributed.kv_events.BlockRemoved",
    "AllBlocksCleared": "vllm.distributed.kv_events.AllBlocksCleared",
}
"""The classes that scripts use, by name: where vLLM has each."""
PARSERS = {
    "serve": "vllm.entrypoints.launchers.cli_args:make_arg_parser",
    "run-batch": "vllm.entrypoints.launchers.run_batch:make_arg_parser",
    "chat": "vllm.entrypoints.cli.openai:ChatCommand.add_cli_args",
    "complete": "vllm.entrypoints.cli.openai:CompleteCommand.add_cli_args",
    "bench latency": "vllm.benchmarks.latency:add_cli_args",
    "bench serve": "vllm.benchmarks.serve:add_cli_args",
    "bench startup": "vllm.benchmarks.startup:add_cli_args",
    "bench throughput": "vllm.benchmarks.throughput:add_cli_args",
}
"""The commands with flags of their own: what adds these."""
TASKS = ("generate", "embed", "classify", "token_embed", "token_classify", "transcription")
_METRIC = re.compile(r"[\"'](vllm:\w+)[\"']")


def members(cls: Any) -> dict[str, Any]:
    """What a class has: fields with their defaults, methods with their parameters, and properties."""
    if isinstance(cls, enum.EnumMeta):
        return {"fields": dict.fromkeys(cls.__members__), "methods": {}, "properties": []}
    methods = {
        name: _parameters(function)
        for name, function in inspect.getmembers(cls, inspect.isroutine)
        if not name.startswith("_") and str(getattr(function, "__module__", "")).startswith("vllm")
    }
    fields = _fields(cls)
    if not fields:
        methods = {"__init__": _parameters(cls.__init__), **methods}
    properties = [
        name
        for name, each in inspect.getmembers(cls)
        if isinstance(each, property) and not name.startswith("_") and name not in fields
    ]
    return {"fields": fields, "methods": methods, "properties": properties}


def _fields(cls: Any) -> dict[str, Any]:
    """A class's fields: [whether it may be left out, its default]."""
    if hasattr(cls, "__struct_fields__"):
        import msgspec

        return {
            field.name: _default(
                field.required,
                field.default if field.default is not msgspec.NODEFAULT else _made(field.default_factory),
            )
            for field in msgspec.structs.fields(cls)
            if not field.name.startswith("_")
        }
    if dataclasses.is_dataclass(cls):
        missing = dataclasses.MISSING
        return {
            field.name: _default(
                field.default is missing and field.default_factory is missing,
                field.default if field.default is not missing else _made(field.default_factory),
            )
            for field in dataclasses.fields(cls)
            if field.init and not field.name.startswith("_")
        }
    if hasattr(cls, "__required_keys__"):
        return {name: [name not in cls.__required_keys__, None] for name in sorted(cls.__annotations__)}
    if hasattr(cls, "_fields"):
        return {name: _default(name not in cls._field_defaults, cls._field_defaults.get(name)) for name in cls._fields}
    return {}


def _made(factory: Any) -> Any:
    try:
        return factory()
    except Exception:
        return None


def _default(is_required: bool, value: Any) -> list[Any]:
    kind = type(value).__name__
    if kind == "FieldInfo":  # pydantic's
        is_required, value = value.is_required(), value.get_default(call_default_factory=True)
    return [not is_required, None if is_required else _plain(value)]


def _plain(value: Any) -> Any:
    """A value as JSON has it, or its representation."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if hasattr(value, "__dict__") and type(value).__module__.startswith("vllm"):
        return {}
    return re.sub(r" at 0x\w+", "", repr(value))


def _parameters(function: Any) -> list[list[Any]]:
    """A function's parameters: [name, whether it is for keywords only, whether it may be left out, its default]."""
    kinds = inspect.Parameter
    return [
        [each.name, each.kind is kinds.KEYWORD_ONLY, *_default(each.default is kinds.empty, each.default)]
        for each in inspect.signature(function).parameters.values()
        if each.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL) and each.name not in ("self", "cls")
    ]


def flags(adds: str) -> dict[str, Any]:
    """A parser's flags and their defaults, by name in the parsed arguments."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    module, _, path = adds.partition(":")
    function = importlib.import_module(module)
    for name in path.split("."):
        function = getattr(function, name)
    function(parser)
    return {
        action.dest: {"flags": list(action.option_strings), "default": _plain(action.default)}
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction)
    }


def _flags_by_command() -> dict[str, Any]:
    """The flags of each command. Those of `serve` are left out of the others if they are the same there."""
    found = {command: flags(adds) for command, adds in PARSERS.items()}
    serve = found["serve"]
    return {
        command: {name: each for name, each in given.items() if command == "serve" or serve.get(name) != each}
        for command, given in found.items()
    }


def endpoints() -> dict[str, Any]:
    """The server's endpoints, with the fields of their bodies."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.enable_scale_out = True  # endpoints that otherwise only say that they are off
    app = build_app(args, TASKS, None)
    for kind in ("pooling", "classify", "embed", "scoring"):  # left out without a model
        app.include_router(importlib.import_module(f"vllm.entrypoints.pooling.{kind}.api_router").router)
    found: dict[str, Any] = {}
    for route in _routes(app):
        for method in sorted(getattr(route, "methods", None) or ()):
            if method != "HEAD":
                found.setdefault(f"{method} {route.path}", {}).update(_bodies(route))
    return found


def _routes(app: Any) -> list[Any]:
    """The application's routes, also those of applications and routers in it."""
    inner = [each for route in app.routes for each in (_routes(route) if hasattr(route, "routes") else [route])]
    return [route for route in inner if hasattr(route, "endpoint")]


def _bodies(route: Any) -> dict[str, Any]:
    """The models of an endpoint's body: their fields, and whether each may be left out, with its default."""
    hints = typing.get_type_hints(inspect.unwrap(route.endpoint)).values()
    return {model.__name__: _model_fields(model) for hint in hints for model in _models(hint)}


def _models(hint: Any) -> list[Any]:
    if hasattr(hint, "model_fields"):
        return [hint] if hint.__module__.startswith("vllm") and not hint.__name__.endswith("Response") else []
    return [model for each in typing.get_args(hint) for model in _models(each)]


def _model_fields(model: Any) -> dict[str, Any]:
    return {
        field.alias or name: _default(field.is_required(), field.get_default(call_default_factory=False))
        if field.default_factory is None
        else [True, None]
        for name, field in model.model_fields.items()
    }


def metrics(folder: Path) -> list[str]:
    """The metrics' names."""
    return sorted({name for path in folder.rglob("*.py") for name in _METRIC.findall(path.read_text(errors="replace"))})


def inventory() -> dict[str, Any]:
    """Everything. Runs in vLLM's Python."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    import vllm

    classes: dict[str, Any] = {}
    for name, place in CLASSES.items():
        module, _, attribute = place.rpartition(".")
        classes[name] = {
            "place": place,
            **members(getattr(importlib.import_module(module), attribute)),
        }
    return {
        "version": vllm.__version__,
        "names": sorted(vllm.__all__),
        "classes": classes,
        "flags": _flags_by_command(),
        "endpoints": endpoints(),
        "metrics": metrics(Path(vllm.__file__).parent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", help="a Python that has vLLM; without it, this one has it")
    args = parser.parse_args()
    if args.peer_python is None:
        json.dump(inventory(), sys.stdout, indent=1)
        return
    done = subprocess.run([args.peer_python, __file__], stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    text = done.stdout[done.stdout.index("\n{") + 1 :] if not done.stdout.startswith("{") else done.stdout
    FILE.write_text(json.dumps(json.loads(text), indent=1, sort_keys=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
