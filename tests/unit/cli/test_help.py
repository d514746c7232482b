"""What `--help` shows: the flags that are used most, and of all flags those that a keyword names."""

from __future__ import annotations

import re

import pytest

from raycore.cli.main import main
from raycore.config import ENGINE_OPTIONS
from raycore.server.listen_options import LISTEN_OPTIONS
from raycore.server.options import SERVER_OPTIONS

WITH_ENGINES = [["serve"], ["generate"], ["run-batch"], ["bench", "latency"], ["bench", "throughput"]]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """What a command says before it exits with this status."""
    monkeypatch.setenv("COLUMNS", "80")

    def told(*arguments: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == status
        said = capsys.readouterr()
        return said.err if status else said.out

    return told


def flags_in(text: str) -> set[str]:
    """The flags that a help text explains."""
    heads = re.findall(r"^  (-.*?)(?:   .*)?$", text, re.MULTILINE)
    return {flag for head in heads for flag in re.findall(r"--[\w-]+", head)}


@pytest.mark.parametrize("command", WITH_ENGINES, ids=" ".join)
def test_the_short_form_has_the_common_options_and_says_where_the_others_are(told, command):
    short, full = told(*command, "--help"), told(*command, "--help=all")
    common = {each.flags[-1] for each in ENGINE_OPTIONS.values() if each.is_common}
    assert common <= flags_in(short) < flags_in(full)
    assert len(short.splitlines()) < 130 < 500 < len(full.splitlines())
    assert "Scheduler (9)" in short
    assert f"raycore {' '.join(command)} --help=all" in short
    assert short.startswith("usage: raycore")


def test_the_short_form_of_serve_fits_a_few_screens(told):
    short = told("serve", "--help")
    options = [*ENGINE_OPTIONS.values(), *SERVER_OPTIONS.values(), *LISTEN_OPTIONS.values()]
    common = {flag for each in options if each.is_common for flag in each.flags if flag.startswith("--")}
    assert flags_in(short) - {"--help", "--config", "--log-level"} - {f"--no-{flag[2:]}" for flag in common} == common
    assert len(short.splitlines()) < 100
    # the first sentence, and the default
    assert "Port to listen on. Default: 8000." in short
    assert "0: a free port" not in short


@pytest.mark.parametrize("command", [["chat"], ["complete"], ["bench", "serve"], ["status"], []], ids=" ".join)
def test_a_command_with_few_flags_has_no_short_form(told, command):
    assert told(*command, "--help") == told(*command, "--help=all")


@pytest.mark.parametrize("keyword", ["KV cache", "kv-cache", "kv_cache", "KVCache", "CacheConfig"])
def test_a_group_is_shown_whole(told, keyword):
    shown = told("serve", f"--help={keyword}")
    of_group = [each for each in ENGINE_OPTIONS.values() if each.group == "KV cache"]
    assert {each.flags[-1] for each in of_group} <= flags_in(shown)
    assert re.findall(r"^\S.*", shown, re.MULTILINE) == ["KV cache:"]


@pytest.mark.parametrize("keyword", ["max-num-seqs", "max_num_seqs", "--max-num-seqs"])
def test_a_flag_is_shown_alone_with_its_whole_text(told, keyword):
    shown = told("generate", f"--help={keyword}")
    assert flags_in(shown) == {"--max-num-seqs"}
    assert "At most max_num_batched_tokens." in shown
    assert flags_in(told("generate", "--help=tp")) == {"--tensor-parallel-size"}


def test_other_words_are_looked_for_in_names_and_then_in_texts(told):
    assert flags_in(told("serve", "--help=prefix")) == {
        *("--enable-prefix-caching", "--no-enable-prefix-caching", "--num-prefix-states")
    }
    assert flags_in(told("serve", "--help=OpenTelemetry")) == {"--otlp-traces-endpoint"}
    assert "--temperature" in flags_in(told("bench", "serve", "--help=temp"))


def test_groups_are_listed(told):
    listed = told("serve", "--help=listgroup")
    assert "Parallelism and placement (" in listed
    assert flags_in(listed) == set()


def test_all_flags_are_shown_in_a_pager(told, monkeypatch):
    pages: list[str] = []
    monkeypatch.setattr("pydoc.pager", pages.append)
    assert told("serve", "--help=page") == ""
    assert pages == [told("serve", "--help=all")]


@pytest.mark.parametrize(
    ("keyword", "advice"),
    [
        ("max-model-length", "did you mean --help='max-model-len'?"),
        ("Schedular", "did you mean --help='Scheduler'?"),
        ("swap-space", "docs/options.md says what becomes of it"),
        ("zzz", "--help=listgroup lists the groups"),
        ("", "--help=listgroup lists the groups"),
    ],
)
def test_a_keyword_that_names_nothing_is_an_error_with_advice(told, keyword, advice):
    said = told("serve", f"--help={keyword}", status=2)
    assert said.startswith(f"raycore serve: no flag or group is called {keyword!r}")
    assert said.rstrip().endswith(advice)
    assert said.count("\n") == 1
