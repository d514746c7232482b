"""Plugins of a package that is installed for the test: what is loaded, and what is said of those that fail."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from configs import make_config
from plugin_package import install, marks

from raycore import plugins
from raycore.checkpoint.model_spec import load_model_spec
from raycore.config import EngineConfig, resolve
from raycore.config.logits_processors import processor_classes
from raycore.demo import demo_model_path
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.scheduler.protocol import load_scheduler_class
from raycore.server.options import server_options
from raycore.server.parsers.reasoning import parser_named as reasoning_parser_named
from raycore.server.parsers.tool_calls import parser_named as tool_parser_named
from raycore.worker.rank import load_worker_class


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """As in a new process, which has loaded no plugin and no module of the package."""
    monkeypatch.setattr(plugins, "_process", plugins._Process([], set(), {}, set()))
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    yield monkeypatch
    for name in [name for name in sys.modules if name.partition(".")[0] == "wagon"]:
        del sys.modules[name]


@pytest.fixture
def site(fresh: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the package is installed."""
    fresh.syspath_prepend(install(tmp_path / "site"))
    return tmp_path / "site"


def calls(site: Path) -> int:
    return marks(site).get(os.getpid(), 0)


def with_architecture(path: Path, **changes: Any) -> Path:
    """A checkpoint of the plugin's architecture, with another shape of config.json."""
    config = json.loads(Path(demo_model_path(), "config.json").read_text())
    config |= {"architectures": ["WagonForCausalLM"], "wagon_layers": config.pop("num_hidden_layers"), **changes}
    config["wagon_width"] = config.pop("hidden_size")
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_general_plugins_are_called_once(site: Path):
    config = resolve(demo_model_path())
    assert config.plugins == plugins.Plugins(None, ["marks"], ["wagon"])
    assert calls(site) == 1
    resolve(demo_model_path())
    plugins.load_general_plugins(EngineConfig.decode(config.encode()).plugins)
    assert calls(site) == 1


@pytest.mark.parametrize(("names", "num_calls"), [("marks", 1), (" other , marks", 1), ("other", 0), ("", 0)])
def test_the_plugins_variable_chooses_plugins_by_name(
    site: Path, fresh: pytest.MonkeyPatch, names: str, num_calls: int
):
    fresh.setenv(plugins.VARIABLE, names)
    assert resolve(demo_model_path()).plugins.general == ["marks"] * num_calls
    assert calls(site) == num_calls
    for group in (plugins.WORKERS, plugins.MODELS):
        assert plugins.plugin_names(group) == []


def test_processes_of_an_engine_load_the_plugins_that_its_driver_chose(site: Path, fresh: pytest.MonkeyPatch):
    fresh.setenv(plugins.VARIABLE, "wagon")
    plugins.load_general_plugins(plugins.Plugins(["marks"], ["marks"]))
    assert calls(site) == 1
    assert plugins.plugin_names(plugins.WORKERS) == []


def test_a_plugin_that_this_process_lacks_is_named(fresh: pytest.MonkeyPatch):
    with pytest.raises(InvalidConfig, match=r"plugin 'marks' of raycore.general_plugins isn't installed"):
        plugins.load_general_plugins(plugins.Plugins(None, ["marks"]))


@pytest.mark.parametrize(
    ("modules", "match"),
    [
        ({"general": "import nothing_like_this"}, "plugin 'marks' of raycore.general_plugins failed: ModuleNotFound"),
        ({"general": "def mark():\n    raise OSError('no wheel')"}, "plugin 'marks' .* failed: OSError: no wheel"),
        ({"general": "mark = 3"}, "plugin 'marks' .* failed: TypeError"),
    ],
)
def test_a_plugin_that_fails_is_named_and_can_be_left_out(
    fresh: pytest.MonkeyPatch, tmp_path: Path, modules: dict[str, str], match: str
):
    fresh.syspath_prepend(install(tmp_path / "site", **modules))
    with pytest.raises(InvalidConfig, match=match):
        resolve(demo_model_path())
    fresh.setenv(plugins.VARIABLE, "")
    assert resolve(demo_model_path()).plugins == plugins.Plugins([], [])


def test_a_plugin_adds_an_architecture(site: Path, tmp_path: Path):
    spec = load_model_spec(with_architecture(tmp_path / "model"))
    own = load_model_spec(Path(demo_model_path()))
    assert (spec.architecture, spec.decoder) == ("WagonForCausalLM", "wagon.decoder.WagonDecoder")
    assert (spec.num_layers, spec.hidden_size, spec.num_heads) == (own.num_layers, own.hidden_size, own.num_heads)
    assert own.decoder is None


def test_an_unknown_architecture_is_refused_with_those_of_plugins(site: Path, tmp_path: Path):
    path = with_architecture(tmp_path / "model", architectures=["TrainForCausalLM"])
    with pytest.raises(InvalidCheckpoint, match=r"TrainForCausalLM.*LlamaForCausalLM.*WagonForCausalLM"):
        load_model_spec(path)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("WAGON = 3", "'WagonForCausalLM' of raycore.model_plugins is 3, not a Family"),
        (
            "from raycore.models.family import Family\nWAGON = Family(convert_config=lambda config: config['axles'])",
            "'WagonForCausalLM' of raycore.model_plugins failed: KeyError: 'axles'",
        ),
    ],
)
def test_a_plugin_whose_architecture_fails_is_named(fresh: pytest.MonkeyPatch, tmp_path: Path, model: str, match: str):
    fresh.syspath_prepend(install(tmp_path / "site", model=model))
    with pytest.raises(InvalidConfig, match=match):
        load_model_spec(with_architecture(tmp_path / "model"))


def test_workers_and_schedulers_of_plugins_are_chosen_by_name(site: Path):
    config = resolve(demo_model_path(), worker_cls="wagon", scheduler_cls="wagon")
    assert load_worker_class(config.parallel).__name__ == "WagonWorker"  # pyright: ignore
    assert load_scheduler_class(config.scheduler).__name__ == "WagonScheduler"  # pyright: ignore
    unknown = resolve(demo_model_path(), worker_cls="cart")
    match = "worker_cls='cart' is neither package.module.Class nor a plugin of raycore.worker_plugins.* wagon"
    with pytest.raises(InvalidConfig, match=match):
        load_worker_class(unknown.parallel)


def test_parsers_of_plugins_are_chosen_by_name(site: Path):
    options = server_options("m", {"tool_call_parser": "wagon", "reasoning_parser": "wagon"})
    assert (options.tool_call_parser, options.reasoning_parser) == ("wagon", "wagon")
    assert tool_parser_named("wagon").__name__ == "WagonToolParser"
    assert reasoning_parser_named("wagon").__name__ == "WagonReasoningParser"
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(InvalidConfig, match=f"{name}='cart' is not supported: use .*'wagon'"):
            server_options("m", {name: "cart"})
    for find in (tool_parser_named, reasoning_parser_named):
        with pytest.raises(InvalidConfig, match=r"'cart' isn't one of .*wagon"):
            find("cart")


def test_logits_processors_of_plugins_are_used_before_those_of_the_option(site: Path):
    config = resolve(demo_model_path(), logits_processors=["wagon.processors.WagonProcessor"])
    assert config.has_logits_processors
    classes = processor_classes(config.plugins, config.logits_processors)
    assert [each.__name__ for each in classes] == ["WagonProcessor"] * 2
    speculative = {"method": "ngram", "num_speculative_tokens": 2}
    assert not resolve(demo_model_path(), speculative_config=speculative).has_logits_processors
    with pytest.raises(InvalidConfig, match=r"plugin 'other' of raycore.logits_processor_plugins isn't installed"):
        processor_classes(plugins.Plugins(None, [], ["other"]), [])


def test_a_config_without_plugins_lists_none():
    assert make_config().plugins == plugins.Plugins(None, [])
