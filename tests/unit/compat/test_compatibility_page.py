"""docs/vllm-compatibility.md: every name of vLLM's is judged, and no reason is out of date."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import write_compatibility
from compatibility import python_names, server_names
from compatibility.entries import Entry, explained, is_equal

from raycore.compat import modules
from raycore.config.vllm_table import VLLM_OPTIONS
from raycore.engine_args import AsyncEngineArgs, EngineArgs
from raycore.errors import InvalidConfig


@pytest.fixture(scope="module")
def table():
    return write_compatibility.table()


def test_everything_that_differs_is_explained(table):
    assert table.unexplained == []


def test_no_reason_is_out_of_date(table):
    assert table.stale == []


def test_the_page_is_that_of_the_code():
    assert write_compatibility.PAGE.read_text() == write_compatibility.page(), "run docs/write_compatibility.py"


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_arguments_of_engines_are_refused_if_the_page_says_so(table, kind):
    area = f"python/{kind.__name__}."
    said = {entry.key.removeprefix(area): entry for entry in table.entries if entry.key.startswith(area)}
    for name in kind.__dataclass_fields__.keys() & said.keys():
        if said[name].status == "refused":
            with pytest.raises(InvalidConfig, match=name):
                kind(**{name: "odd"}).create_engine_config()
        elif said[name].note.startswith("taken, without effect"):
            is_flag = name in VLLM_OPTIONS and VLLM_OPTIONS[name].is_bool
            kind(**{name: True if is_flag else "odd"}).create_engine_config()


def test_every_area_has_names_that_are_the_same(table):
    for area in write_compatibility.AREAS:
        assert any(entry.key.startswith(f"{area}/") and entry.status == "same" for entry in table.entries)


def test_reasons_explain_what_needs_one_and_nothing_else():
    entries = [
        Entry("a/same", "same"),
        Entry("a/other", "refused"),
        Entry("a/third", "different", "known already"),
        Entry("b/[x]", "different"),
    ]
    found = explained(entries, {"a/same": "it isn't there", "a/*": "of a", "c/*": "of c"})
    assert [entry.note for entry in found.entries] == ["", "of a", "known already", ""]
    assert found.unexplained == ["b/[x]"]
    assert found.stale == ["a/same", "c/*"]


class Ours:
    field = 1

    def __init__(self, a: int, b: int = 2) -> None: ...

    def call(self, x: int, *, y: int = 3, z: int = 4) -> None: ...

    def takes_any(self, **options: Any) -> None: ...


@dataclasses.dataclass
class OurFields:
    a: int
    b: int = 2
    c: list[int] = dataclasses.field(default_factory=list)


def judged(monkeypatch, ours, **described):
    """The statuses and notes of a class's members, by name."""
    monkeypatch.setitem(python_names.NAMES, "module", {"Theirs": "somewhere"})
    monkeypatch.setattr(python_names, "lookup", lambda module, name: ours)
    members = {"place": "vllm.module.Theirs", "fields": {}, "methods": {}, "properties": [], **described}
    return {entry.name: entry[1:] for entry in python_names.classes({"classes": {"Theirs": members}})}


def test_methods_are_compared_by_names_places_and_defaults_of_parameters(monkeypatch):
    found = judged(
        monkeypatch,
        Ours,
        methods={
            "__init__": [["a", False, False, None], ["b", False, True, 5], ["c", False, True, None]],
            "call": [["y", False, True, 3], ["x", False, True, None], ["z", True, True, 4]],
            "takes_any": [["q", True, True, None]],
            "absent": [],
        },
        properties=["field", "prop"],
    )
    assert found == {
        "Theirs.field": ("same", ""),
        "Theirs.prop": ("refused", ""),
        "Theirs()": ("same", ""),
        "Theirs(a)": ("same", ""),
        "Theirs(b)": ("different", "default: `2`, not `5`"),
        "Theirs(c)": ("refused", ""),
        "Theirs.call()": ("same", ""),
        "Theirs.call(y)": ("different", "is for keywords only"),
        "Theirs.call(x)": ("different", "has to be given"),
        "Theirs.call(z)": ("same", ""),
        "Theirs.takes_any()": ("same", ""),
        "Theirs.absent()": ("refused", ""),
    }


def test_fields_are_compared_by_names_and_defaults(monkeypatch):
    fields = {"a": [True, None], "b": [True, 2], "c": [True, None], "d": [True, 1]}
    assert judged(monkeypatch, OurFields, fields=fields) == {
        "Theirs.a": ("different", "has to be given"),
        "Theirs.b": ("same", ""),
        "Theirs.c": ("same", ""),
        "Theirs.d": ("refused", ""),
    }


def test_engine_options_are_judged_by_the_options():
    def judge(name, default):
        return python_names.engine_options(name, default, "x/y")[1:]

    assert judge("max_num_batched_tokens", None)[0] == "same"
    assert judge("block_size", 7) == ("different", "default: 16")
    assert judge("max_num_scheduled_tokens", None)[0] == "refused"
    assert judge("calculate_kv_scales", False)[1].endswith("(use kv_cache_dtype) (taken: `False`)")
    assert judge("compilation_config", None)[0] == "different"
    assert judge("of_the_future", 1) == ("refused", "")


def test_flags_endpoints_and_fields_that_are_missing_are_refused():
    inventory = {
        "flags": {
            "serve": {
                "port": {"flags": ["--port"], "default": 8000},
                "new": {"flags": ["--new-flag"], "default": None},
                "seed": {"flags": ["--seed", "-new"], "default": 0},
            },
            "future": {},
        },
        "endpoints": {
            "GET /v1/models/{name}": {},
            "POST /new": {"NewRequest": {"x": [True, None]}},
            "POST /detokenize": {"DetokenizeRequest": {"tokens": [False, None], "new": [True, None]}},
        },
        "metrics": ["vllm:num_requests_running", "vllm:new"],
    }
    judges = (server_names.flags, server_names.endpoints, server_names.fields, server_names.metrics)
    found = {entry.key: entry.status for judge in judges for entry in judge(inventory)}
    assert found == {
        "flag/serve --port": "same",
        "flag/serve --new-flag": "refused",
        "flag/serve --seed": "different",
        "flag/future": "refused",
        "endpoint/GET /v1/models/{name}": "same",
        "endpoint/POST /new": "refused",
        "endpoint/POST /detokenize": "same",
        "http/NewRequest (POST /new)": "refused",
        "http/DetokenizeRequest.tokens": "same",
        "http/DetokenizeRequest.new": "different",
        "metric/vllm:num_requests_running": "same",
        "metric/vllm:new": "refused",
    }


def test_defaults_are_compared_by_their_meaning():
    assert is_equal([], ())
    assert is_equal({}, None)
    assert is_equal(1, 1.0)
    assert not is_equal(0, None)
    assert not is_equal(False, None)
    assert not is_equal("a", None)
    assert modules.lookup("", "LLM").__name__ == "LLM"
