"""The parser of vLLM's scripts, and the small functions that they import."""

from __future__ import annotations

import logging

import pytest

from raycore.compat.arguments import FlexibleArgumentParser
from raycore.compat.processors import process_dict_updates
from raycore.compat.utilities import (
    get_ip,
    get_open_ports_list,
    get_tokenizer,
    init_logger,
    print_embeddings,
    random_uuid,
    split_host_port,
)
from raycore.demo import demo_model_path
from raycore.errors import InvalidCheckpoint
from raycore.sampling.logits_processors import BatchUpdate, MoveDirectionality
from raycore.sampling_params import SamplingParams


@pytest.fixture
def parser():
    parser = FlexibleArgumentParser(description="a script")
    parser.add_argument("--max-tokens", type=int, default=1)
    parser.add_argument("--num_prompts", type=int, default=1, deprecated=True)
    parser.add_argument("--extra-config", default=None)
    parser.add_argument("rest", nargs="*")
    return parser


@pytest.mark.parametrize("hyphen", "-_")
def test_flags_may_have_hyphens_or_underscores(parser, hyphen):
    args = parser.parse_args([f"--max{hyphen}tokens", "5", f"--num{hyphen}prompts=7"])
    assert (args.max_tokens, args.num_prompts) == (5, 7)


def test_settings_of_an_object_may_be_given_one_by_one(parser):
    given = ["--extra_config.a.b", "1", "--extra-config.c+", "x", "--extra-config.c+=y,z", "--extra-config.d=text"]
    args = parser.parse_args(given)
    assert args.extra_config == '{"a": {"b": 1}, "c": ["x", "y", "z"], "d": "text"}'


def test_values_stay_as_they_are(parser):
    args, unknown = parser.parse_known_args(["--extra-config", "a_b.c", "--un_known=1", "--", "--max_tokens.a"])
    assert args.extra_config == "a_b.c"
    assert args.rest == ["--max_tokens.a"]
    assert unknown == ["--un_known=1"]


def test_the_small_functions(capsys):
    assert len(random_uuid()) == 16
    assert random_uuid() != random_uuid()
    assert len(set(get_open_ports_list(3))) == 3
    assert get_ip().count(".") == 3
    assert split_host_port("[::1]:80") == ("::1", 80)
    print_embeddings([0.5] * 9)
    assert capsys.readouterr().out.endswith("0.5000, ...] (size=9)\n")


def test_a_table_of_requests_follows_the_batch():
    table = {0: "a", 1: "b", 2: "c"}
    added = [(2, SamplingParams(extra_args={"x": 1}), None, []), (3, SamplingParams(), [1], [])]
    moved = [(1, 3, MoveDirectionality.UNIDIRECTIONAL), (3, 2, MoveDirectionality.SWAP)]
    update = BatchUpdate(4, removed=[0], added=added, moved=moved)
    assert process_dict_updates(table, update, lambda params, prompt, output: params.extra_args)
    assert table == {2: "b", 3: {"x": 1}}
    assert not process_dict_updates(table, None, lambda *_: "x")
    assert not process_dict_updates(table, BatchUpdate(4, [7], [], []), lambda *_: "x")


def test_a_tokenizer_is_read_from_a_checkpoint():
    tokenizer = get_tokenizer(demo_model_path(), tokenizer_mode="auto", trust_remote_code=False)
    assert tokenizer.decode(tokenizer.encode("1 + 1 =")) == "1 + 1 ="
    with pytest.raises(InvalidCheckpoint, match="tokenizer='nobody/nothing' isn't a directory"):
        get_tokenizer("nobody/nothing")


def test_messages_are_logged_once(caplog):
    logger = init_logger("test_compat")
    assert logger is init_logger("test_compat")
    with caplog.at_level(logging.INFO):
        for number in (1, 1, 2):
            logger.info_once("number %d", number)
            logger.warning("always")
    assert caplog.messages == ["number 1", "always", "always", "number 2", "always"]
