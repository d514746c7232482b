"""The prompts of benchmarks, and when they are sent."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycore.cli.bench.choices import DATASET_NAMES
from raycore.cli.bench.samples import DATASETS, Sample, samples
from raycore.cli.bench.serve import Traffic, arrival_times_s
from raycore.cli.main import build_parser
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig
from raycore.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(demo_model_path())


@pytest.fixture
def chosen(tokenizer: Tokenizer) -> Any:
    def choose(*flags: str) -> list[Sample]:
        return samples(build_parser().parse_args(["bench", "serve", *flags]), tokenizer)

    return choose


def test_the_flag_names_all_datasets() -> None:
    assert list(DATASETS) == list(DATASET_NAMES)


def test_random_prompts_have_the_lengths_that_are_asked_for(chosen: Any, tokenizer: Tokenizer) -> None:
    flags = ["--num-prompts", "20", "--random-input-len", "30", "--random-output-len", "7"]
    found = chosen(*flags)
    assert len({each.prompt for each in found}) == 20
    assert all(each.prompt_len == len(tokenizer.encode(each.prompt, False)) for each in found)
    assert all(abs(each.prompt_len - 30) <= 1 for each in found)
    assert {each.output_len for each in found} == {7}
    assert chosen(*flags) == found
    assert chosen(*flags, "--seed", "1") != found
    assert {each.output_len for each in chosen("--num-prompts", "2", "--input-len", "9", "--output-len", "5")} == {5}


def test_random_lengths_vary_within_the_ratio(chosen: Any) -> None:
    flags = ["--num-prompts", "60", "--random-input-len", "20", "--random-output-len", "10"]
    found = chosen(*flags, "--random-range-ratio", '{"input": 0, "output": 0.5}')
    lengths = {each.output_len for each in found}
    assert lengths <= set(range(5, 16))
    assert len(lengths) > 5
    for ratio in ("1", "-0.1", "x", '{"input": 0.5}'):
        with pytest.raises(InvalidConfig, match="--random-range-ratio"):
            chosen(*flags, "--random-range-ratio", ratio)


def test_random_prompts_may_begin_alike(chosen: Any) -> None:
    found = chosen("--num-prompts", "4", "--random-input-len", "8", "--random-prefix-len", "40")
    assert len({each.prompt[:20] for each in found}) == 1
    assert len({each.prompt for each in found}) == 4


def test_prefixes_are_repeated(chosen: Any) -> None:
    flags = ["--prefix-repetition-prefix-len", "30", "--prefix-repetition-suffix-len", "5", "--num-prompts", "10"]
    found = chosen("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "3", *flags)
    assert sorted(Counter(each.prompt[:15] for each in found).values()) == [3, 3, 4]
    with pytest.raises(InvalidConfig, match="--prefix-repetition-num-prefixes 11"):
        chosen("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "11", *flags)


def test_conversations_of_a_file(chosen: Any, tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    talks = [
        {"id": 1, "conversations": [{"from": "human", "value": f"what is {i} + {i}?"}, {"value": f"it is {2 * i} yes"}]}
        for i in range(4)
    ]
    unusable = [{"conversations": [{"value": "alone"}]}, {"conversations": [{"value": "a"}, {"value": "b"}]}, {}]
    path.write_text(json.dumps([*talks, *unusable]))
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(path)]
    found = chosen(*flags, "--num-prompts", "6")
    assert {each.prompt for each in found} == {f"what is {i} + {i}?" for i in range(4)}
    assert len(found) == 6
    assert all(each.output_len > 4 for each in found)
    assert len(chosen(*flags, "--num-prompts", "6", "--no-oversample")) == 4
    in_order = chosen(*flags, "--num-prompts", "2", "--disable-shuffle", "--sharegpt-output-len", "3")
    assert [(each.prompt, each.output_len) for each in in_order] == [("what is 0 + 0?", 3), ("what is 1 + 1?", 3)]


def test_prompts_of_a_file_of_lines(chosen: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "1 + 1 =", "output_tokens": 5}\n\n{"prompt": "2 + 2 ="}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "2", "--disable-shuffle"]
    in_template = [each.prompt for each in chosen(*flags)]
    assert all(text in prompt and text != prompt for text, prompt in zip(("1 +", "2 +"), in_template, strict=True))
    assert chosen(*flags, "--backend", "openai-chat")[0].prompt == "1 + 1 ="
    flags.append("--skip-chat-template")
    assert [(each.prompt, each.output_len) for each in chosen(*flags)] == [("1 + 1 =", 256), ("2 + 2 =", 256)]
    with pytest.raises(InvalidConfig, match="a line has no output_tokens"):
        chosen(*flags, "--custom-output-len", "-1")
    path.write_text('{"text": "1"}')
    with pytest.raises(InvalidConfig, match=r"own\.jsonl: .*prompt"):
        chosen(*flags)


def test_lines_of_a_poem(chosen: Any, tmp_path: Path) -> None:
    path = tmp_path / "poem"
    path.write_text("\n".join(f"line {i} + {i} of it" for i in range(30)))
    flags = ["--dataset-name", "sonnet", "--dataset-path", str(path), "--num-prompts", "3"]
    found = chosen(*flags, "--sonnet-input-len", "200", "--sonnet-prefix-len", "60", "--sonnet-output-len", "9")
    assert all(150 < each.prompt_len < 250 for each in found)
    assert len({each.prompt for each in found}) == 3
    assert len({each.prompt[:80] for each in found}) == 1
    with pytest.raises(InvalidConfig, match="--sonnet-prefix-len 200 is more"):
        chosen(*flags, "--sonnet-input-len", "100")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--dataset-name", "random-mm"], "--dataset-name random-mm is not supported: use random, sharegpt"),
        (["--dataset-name", "custom"], "--dataset-name custom needs --dataset-path FILE"),
        (["--dataset-name", "sharegpt", "--dataset-path", "/no/such"], "/no/such: .*No such file"),
        (["--num-prompts", "0"], "--num-prompts 0 isn't at least 1"),
        (["--random-output-len", "0"], "--random-output-len 0 isn't at least 1"),
        (["--random-input-len", "-3"], "--random-input-len -3 isn't at least 1"),
    ],
)
def test_prompts_that_cannot_be_made_are_refused(chosen: Any, flags: list[str], told: str) -> None:
    with pytest.raises(InvalidConfig, match=told):
        chosen(*flags)


def times(traffic: Traffic, count: int = 400) -> list[float]:
    return list(arrival_times_s(traffic, count, np.random.default_rng(0)))


def test_requests_arrive_at_the_rate() -> None:
    assert times(Traffic(), 3) == [0, 0, 0]
    assert times(Traffic(4.0, math.inf), 4) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    found = times(Traffic(10.0))
    assert found[-1] == pytest.approx(40)
    assert found == sorted(found)


def test_burstiness_is_how_regular_arrivals_are() -> None:
    spread = {each: float(np.std(np.diff(times(Traffic(10.0, each))))) for each in (0.2, 1.0, 50.0)}
    assert spread[0.2] > 1.5 * spread[1.0] > 5 * spread[50.0]


@pytest.mark.parametrize("kind", ["linear", "exponential"])
def test_the_rate_ramps_up(kind: Any) -> None:
    traffic = Traffic(ramp_up=kind, start_rate=1.0, end_rate=16.0, burstiness=math.inf)
    assert [traffic.rate_of(0, 3), traffic.rate_of(2, 3)] == pytest.approx([1, 16])
    assert traffic.rate_of(1, 3) == pytest.approx(8.5 if kind == "linear" else 4)
    gaps = np.diff(times(traffic, 20))
    assert (gaps[:-1] >= gaps[1:]).all()
