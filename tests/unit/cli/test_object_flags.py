"""Settings of options that are objects, given one by one, as vLLM's flags have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raycore.cli.engine_options import chosen_engine_options, chosen_server_options
from raycore.cli.main import build_parser
from raycore.errors import InvalidConfig


def chosen(*flags: str) -> dict[str, Any]:
    return chosen_engine_options(build_parser().parse_args(["serve", *flags]))


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "3"],
        ["--speculative_config.method=ngram", "--speculative_config.num_speculative_tokens=3"],
        [
            "--speculative-config",
            '{"method": "x", "num_speculative_tokens": 3}',
            "--speculative-config.method",
            "ngram",
        ],
        ["--speculative-config.method", "ngram", '--speculative-config={"num_speculative_tokens": 3}'],
    ],
)
def test_settings_of_an_object_may_be_flags_of_their_own(flags: list[str]) -> None:
    config = chosen(*flags)["speculative_config"]
    assert (config.method, config.num_speculative_tokens) == ("ngram", 3)


def test_objects_in_objects_and_lists() -> None:
    flags = ["--hf-overrides.rope_scaling.factor", "2.5", "--hf-overrides.rope_scaling.type", "yarn"]
    flags += ["--hf-overrides.names+", "a", "--hf-overrides.names+=b,3", "--hf-overrides.tied", "True"]
    assert chosen(*flags)["hf_overrides"] == {
        "rope_scaling": {"factor": 2.5, "type": "yarn"},
        "names": ["a", "b", 3],
        "tied": True,
    }


def test_short_flags_have_settings_too() -> None:
    chosen("-cc.mode", "3", "-cc.cudagraph_capture_sizes+", "1,2", "-O3")
    args = build_parser().parse_args(["serve", "-cc.mode", "3"])
    assert vars(args)["vllm.compilation_config"] == {"mode": 3}


def test_a_setting_of_the_server(tmp_path: Path) -> None:
    config = tmp_path / "flags.yaml"
    config.write_text("default-chat-template-kwargs: {a: 1, b: 2}\n")
    args = build_parser().parse_args(["serve", "--config", str(config), "--default-chat-template-kwargs.b", "3"])
    assert chosen_server_options(args, "m").default_chat_template_kwargs == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--speculative-config.method"], "argument --speculative-config.method: expected one argument"),
        (["--block-size.x", "3"], "block_size"),
        (["--speculative-confg.method", "x"], "unknown flag --speculative-confg.method"),
    ],
)
def test_unusable_settings_are_refused_by_name(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chosen(*flags)
    assert told in capsys.readouterr().err


def test_structured_outputs_config_is_checked_by_setting(capsys: pytest.CaptureFixture[str]) -> None:
    chosen("--structured-outputs-config.backend", "xgrammar", "--structured-outputs-config.disable_fallback", "true")
    compact = chosen("--structured-outputs-config.disable_any_whitespace", "true")["structured_outputs_config"]
    assert compact.disable_any_whitespace
    for flags, told in (
        (["--structured-outputs-config.backend", "mine"], "backend='mine' is not supported"),
        (["--structured-outputs-config.color", "red"], "unknown setting 'color'"),
    ):
        with pytest.raises(SystemExit):
            chosen(*flags)
        assert told in capsys.readouterr().err


def test_structured_outputs_config_may_name_the_reasoning_parser() -> None:
    inside = ["--structured-outputs-config.reasoning_parser", "qwen3"]
    for flags, parser in ((inside, "qwen3"), ([*inside, "--reasoning-parser", "deepseek_r1"], "deepseek_r1")):
        args = build_parser().parse_args(["serve", *flags])
        assert chosen_server_options(args, "m").reasoning_parser == parser
    args = build_parser().parse_args(["serve", "--structured-outputs-config", '{"reasoning_parser": "mine"}'])
    with pytest.raises(InvalidConfig, match="reasoning_parser='mine'"):
        chosen_server_options(args, "m")


def test_prompts_after_the_flags_keep_their_dots() -> None:
    args = build_parser().parse_args(["generate", "--block-size", "32", "--", "a.b", "--speculative-config.method"])
    assert args.prompts == ["a.b", "--speculative-config.method"]


def test_levels_of_the_log_are_taken_in_capitals() -> None:
    assert build_parser().parse_args(["serve", "--log-level", "DEBUG"]).log_level == "debug"


def test_adapters_may_be_a_list_in_json() -> None:
    text = '[{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}]'
    args = build_parser().parse_args(["serve", "--enable-lora", "--lora-modules", text, "c=/c"])
    assert [each.name for each in chosen_server_options(args, "m").lora_modules] == ["a", "b", "c"]
