"""`EngineArgs`: an engine's options as an object, derived from their declarations."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from raycore import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs
from raycore.cli.parser import Parser
from raycore.config import ENGINE_OPTIONS, resolve
from raycore.config.vllm_table import VLLM_OPTIONS, without_vllm_options
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig

MODEL = str(demo_model_path())


def test_arguments_are_all_options_with_their_defaults() -> None:
    args = EngineArgs(MODEL)
    fields = {each.name for each in dataclasses.fields(args)}  # pyright: ignore[reportArgumentType]
    assert fields >= {*ENGINE_OPTIONS, *VLLM_OPTIONS, "use_tqdm_on_load", "served_model_name"}
    assert EngineArgs() == args
    assert all(getattr(args, each.name) == each.default for each in ENGINE_OPTIONS.values() if each.name != "model")
    assert list(inspect.signature(EngineArgs).parameters)[:2] == ["model", "tokenizer"]
    assert args.distributed_executor_backend == "ray"
    assert repr(EngineArgs(max_num_seqs=3)) == "EngineArgs(max_num_seqs=3)"
    other = EngineArgs(MODEL)
    other.compilation_config, args.attention_config["a"] = 3, 1
    assert (args.compilation_config, other.attention_config) == (None, {})


def test_explicit_defaults_make_the_same_engine() -> None:
    args = EngineArgs(MODEL)
    options = dataclasses.asdict(args)  # pyright: ignore[reportArgumentType]
    assert options == vars(args)
    del options["use_tqdm_on_load"]
    assert resolve(**options) == resolve(MODEL) == args.create_engine_config()
    args.max_model_len = 64
    assert args.create_engine_config().model.max_model_len == 64
    assert pickle.loads(pickle.dumps(args)) == args == dataclasses.replace(args)  # pyright: ignore[reportArgumentType]


def test_unknown_arguments_and_wrong_values_are_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"EngineArgs: unknown option 'max_num_seq'; did you mean max_num_seqs\?"):
        EngineArgs(max_num_seq=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(InvalidConfig, match="only the model is given by position: name 'auto'"):
        EngineArgs(MODEL, "auto")  # pyright: ignore[reportCallIssue]
    with pytest.raises(InvalidConfig, match="max_num_seqs=0 isn't a positive integer"):
        EngineArgs(max_num_seqs=0).create_engine_config()
    with pytest.raises(InvalidConfig, match="enable_dbo=True is not supported"):
        EngineArgs(enable_dbo=True).create_engine_config()


@pytest.mark.parametrize("parser", [argparse.ArgumentParser, Parser])
def test_arguments_come_from_a_command_line(parser: type[argparse.ArgumentParser]) -> None:
    made = EngineArgs.add_cli_args(parser())
    made.add_argument("--prompt", default="x")
    made.set_defaults(model=MODEL, max_num_seqs=5)
    line = ["--max-model-len", "64", "--no-enable-prefix-caching", "--compilation-config", '{"level": 3}']
    args = made.parse_args(line)
    assert (args.model, args.max_num_seqs, args.seed, args.prompt) == (MODEL, 5, 0, "x")
    found = EngineArgs.from_cli_args(args)
    assert (found.max_model_len, found.max_num_seqs, found.enable_prefix_caching) == (64, 5, False)
    assert found.compilation_config == {"level": 3}
    config = found.create_engine_config()
    assert config == resolve(MODEL, max_num_seqs=5, max_model_len=64, enable_prefix_caching=False)
    options = vars(args)
    del options["prompt"], options["use_tqdm_on_load"]
    assert resolve(**options) == config


def test_a_command_line_with_no_arguments_gives_the_defaults() -> None:
    args = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args([])
    found = AsyncEngineArgs.from_cli_args(args)
    assert found.create_engine_config() == resolve(MODEL)
    assert found.enable_log_requests is False
    assert isinstance(found, EngineArgs)
    assert without_vllm_options(vars(found)).keys() - ENGINE_OPTIONS.keys() == {
        "enable_log_requests",
        "use_tqdm_on_load",
    }


def test_flags_that_a_parser_has_already_are_left_alone() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=str)
    parser.add_argument("--swap-space", type=str)
    args = EngineArgs.add_cli_args(parser).parse_args(["--seed", "7", "--swap-space", "x"])
    assert (args.seed, args.swap_space) == ("7", "x")


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_engines_start_with_their_arguments(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(kind, "__init__", lambda self, **options: started.append(options))
    monkeypatch.setattr(kind, "__repr__", object.__repr__)
    watchers: list[object] = []
    monkeypatch.setattr(kind, "watch", lambda self, watcher: watchers.append(watcher))
    monkeypatch.setattr(kind, "get_tokenizer", lambda self: None)
    args = AsyncEngineArgs(MODEL, max_num_seqs=3, enable_log_requests=True)  # pyright: ignore[reportCallIssue]
    kind.from_engine_args(args, usage_context="x")
    assert [type(each).__name__ for each in watchers] == ["RequestLog"]
    assert "enable_log_requests" not in started[0]
    assert started[0].pop("use_tqdm_on_load") is True
    assert resolve(**started[0]) == resolve(MODEL, max_num_seqs=3)
    with pytest.raises(InvalidConfig, match="stat_loggers has 1: give classes"):
        kind.from_engine_args(args, stat_loggers=[1])
