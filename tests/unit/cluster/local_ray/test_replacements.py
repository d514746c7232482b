"""What is replaced in the installed Ray, and what happens on a Ray that lacks some of it."""

from __future__ import annotations

import logging
import os
from pkgutil import resolve_name

import pytest
from ray._private.authentication import authentication_token_setup

from raycore.cluster.local_ray import replacements
from raycore.cluster.local_ray.replacements import CLUSTER_PROCESSES, SHIELD, TOKEN, command_of_idle_agent, replaced
from raycore.ray_api import TOKEN_VARIABLE

REPLACED = CLUSTER_PROCESSES | SHIELD | TOKEN


def test_the_installed_ray_has_every_function_that_is_replaced(caplog):
    with caplog.at_level(logging.WARNING, "raycore"), replaced(REPLACED):
        pass
    assert caplog.records == []


@pytest.mark.parametrize("name", REPLACED)
def test_a_function_that_ray_lacks_is_named_and_the_others_are_replaced(monkeypatch, caplog, name):
    owner, _, attribute = name.rpartition(".")
    monkeypatch.delattr(resolve_name(owner), attribute)
    others = {other: resolve_name(other) for other in REPLACED if other != name}
    with caplog.at_level(logging.WARNING, "raycore"), replaced(REPLACED):
        assert all(resolve_name(other) is not original for other, original in others.items())
        assert not hasattr(resolve_name(owner), attribute)
    assert {other: resolve_name(other) for other in others} == others
    (record,) = caplog.records
    assert f"has no {name}, " in record.getMessage()


@pytest.mark.parametrize("name", ["ray._private.gone.function", "ray._private.node.Gone.method", "gone.function"])
def test_a_module_or_a_class_that_ray_lacks_is_no_error(caplog, name):
    with caplog.at_level(logging.WARNING, "raycore"), replaced({name: lambda original: original}):
        pass
    assert f"has no {name}, " in caplog.text


def test_a_replacement_gets_the_original_and_its_arguments_until_the_block_ends(monkeypatch):
    class Node:
        def start(self, what: str) -> str:
            return f"started {what}"

    monkeypatch.setattr(replacements, "Node", Node, raising=False)
    name = f"{replacements.__name__}.Node.start"
    with replaced({name: lambda start, node, what: start(node, f"no {what}")}):
        assert Node().start("monitor") == "started no monitor"
    assert Node().start("monitor") == "started monitor"


@pytest.mark.parametrize("replacement", REPLACED.values(), ids=lambda replacement: replacement.__name__)
def test_a_replacement_says_why_it_exists_and_when_it_goes(replacement):
    assert "\n    Why: " in replacement.__doc__
    assert "\n    Goes when: " in replacement.__doc__


def test_only_the_commands_of_agents_are_changed():
    def python_command(component: str, session: str, *, unbuffered: bool = True) -> list[str]:
        return ["python", component, session, str(unbuffered)]

    command = command_of_idle_agent(python_command, "dashboard", "session", unbuffered=False)
    assert command == ["python", "dashboard", "session", "False"]
    *_, script, kind = command_of_idle_agent(python_command, "runtime_env_agent", "session")
    assert script.endswith("idle_agent.py")
    assert kind == "runtime_env"


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError, RuntimeError])
def test_a_ray_without_a_home_gets_a_random_token_in_the_environment(monkeypatch, error):
    def save() -> None:
        raise error

    monkeypatch.setattr(authentication_token_setup, "generate_and_save_token", save)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    tokens: set[str] = set()
    for _ in range(2):
        with replaced(TOKEN):
            authentication_token_setup.generate_and_save_token()
        tokens.add(os.environ.pop(TOKEN_VARIABLE))
    assert [len(token) for token in tokens] == [64, 64]


def test_a_token_that_can_be_saved_is_not_in_the_environment(monkeypatch):
    monkeypatch.setattr(authentication_token_setup, "generate_and_save_token", lambda: None)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with replaced(TOKEN):
        authentication_token_setup.generate_and_save_token()
    assert TOKEN_VARIABLE not in os.environ
