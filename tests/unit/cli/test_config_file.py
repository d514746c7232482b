"""`--config FILE.yaml`: flags from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raycore.cli.main import build_parser


def parsed(tmp_path: Path, text: str, *arguments: str, command: str = "serve") -> dict[str, Any]:
    """What a command line with this file says."""
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    return vars(build_parser().parse_args([command, "--config", str(path), *arguments]))


def refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parsed(tmp_path, text)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_keys_are_names_of_flags_with_hyphens_or_underscores(tmp_path):
    text = """
        model: /models/chat
        data-parallel-size: 2
        max_model_len: 64
        enable-prefix-caching: false
        batch_invariant: true
        served-model-name: [chat, default]
        standby-delay-s: null
        num-threads:
        port: 0
        disable-log-stats: true
        max-logprobs: null
        chat-template: "{{ messages }}"
        attention-config: {}
        seed: -3
        """
    found = parsed(tmp_path, text)
    assert found["engine.model"] == "/models/chat"
    assert (found["engine.data_parallel_size"], found["engine.max_model_len"], found["engine.seed"]) == (2, 64, -3)
    assert (found["engine.enable_prefix_caching"], found["engine.batch_invariant"]) == (False, True)
    assert found["server.served_model_name"] == ["chat", "default"]
    assert found["engine.standby_delay_s"] is None
    assert found["engine.num_threads"] is None
    assert found["server.chat_template"] == "{{ messages }}"
    assert found["vllm.attention_config"] == {}
    assert (found["listen.port"], found["disable_log_stats"]) == (0, True)
    assert "server.max_logprobs" not in found


@pytest.mark.parametrize("arguments", [("--block-size", "8", "/given"), ("/given", "--block_size=8")])
def test_command_line_flags_win_over_the_config_file(tmp_path, arguments):
    found = parsed(tmp_path, "model: /in/file\nblock-size: 16\nserved-model-name: [a, b]\n", *arguments)
    assert (found["engine.model"], found["engine.block_size"]) == ("/given", 8)
    assert found["server.served_model_name"] == ["a", "b"]


def test_a_flag_that_a_command_needs_may_be_in_the_file(tmp_path):
    found = parsed(tmp_path, "input-file: a.jsonl\noutput_file: b.jsonl\n", command="run-batch")
    assert (str(found["input_file"]), str(found["output_file"])) == ("a.jsonl", "b.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_model_length: 64", "unknown flag 'max_model_length'; did you mean max-model-len?"),
        ("colour: red", "unknown flag 'colour'"),
        ("config: other.yaml", "unknown flag 'config'"),
        ("block-size: big", "block_size='big' isn't an integer from 1 to 1024"),
        ("block-size: true", "block_size='true' isn't an integer from 1 to 1024"),
        ("enable-prefix-caching: maybe", "ignored explicit argument 'maybe'"),
        ("- block-size", "not a mapping of flags to values"),
        ("a: [", "flags.yaml isn't valid YAML: while parsing a flow node expected the node content"),
        ("port: 1\n\x00", "flags.yaml isn't valid YAML: "),
    ],
)
def test_an_invalid_config_file_is_refused_in_one_line(tmp_path, text, message, capsys):
    told = refused(tmp_path, text, capsys)
    assert message in told
    assert told.startswith("raycore serve: error: ")
    assert told.endswith(" (`raycore serve --help=all` lists all flags)\n")
    assert told.count("\n") == 1


def test_a_missing_config_file_is_named(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--config", "/nowhere.yaml"])
    assert "/nowhere.yaml" in capsys.readouterr().err
