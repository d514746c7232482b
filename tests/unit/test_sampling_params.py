"""Which sampling parameters are taken, and what is said of the others."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import raycore
from raycore.errors import InvalidRequest
from raycore.sampling_params import MAX_SEED, RequestOutputKind, SamplingParams

PACKAGE = Path(raycore.__file__).parent


def test_sampling_params_have_the_documented_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (16, 0, False)
    assert (params.seed, params.stop, params.logprobs, params.prompt_logprobs) == (None, None, None, None)
    assert (params.detokenize, params.skip_special_tokens, params.include_stop_str_in_output) == (True, True, False)


def test_each_sampling_parameter_is_read_somewhere_so_none_is_dropped_in_silence() -> None:
    own = [PACKAGE / "sampling_params.py", *(PACKAGE / "server").rglob("*.py")]
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path not in own)
    read = {name.removesuffix("_strings") for name in re.findall(r"\bparams?\.(\w+)", source)}
    parameters = {field.name for field in msgspec.structs.fields(SamplingParams)}
    without_effect = {"spaces_between_special_tokens", "skip_clone", "watermarking"}
    assert parameters - read == without_effect, "only these have no effect on raycore itself"


def test_the_first_parameters_may_be_given_by_position_in_vllms_order() -> None:
    params = SamplingParams(2, 0.1, 0.2, 1.5, 0.7, None, 0.9, 5, 0.01, 7, ["x"], [3], True, 9, 2, 4, 6)
    assert params == SamplingParams(
        n=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.5,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.01,
        seed=7,
        stop=["x"],
        stop_token_ids=[3],
        ignore_eos=True,
        max_tokens=9,
        min_tokens=2,
        logprobs=4,
        prompt_logprobs=6,
    )
    with pytest.raises(TypeError):
        SamplingParams(*[None] * 18)  # pyright: ignore[reportCallIssue]


def test_from_optional_takes_none_for_the_default_and_texts_for_token_ids() -> None:
    assert SamplingParams.from_optional(temperature=None, n=None, seed=None, ignore_eos=None) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional(logit_bias={"5": 1000, 6: -0.5}).logit_bias == {5: 100.0, 6: -0.5}
    for bad in ({"x": 1.0}, {"-1": 1.0}, {"5": "x"}):
        with pytest.raises(InvalidRequest, match="logit_bias"):
            SamplingParams.from_optional(logit_bias=bad)


def test_extra_arguments_are_copied_values_as_in_json() -> None:
    given = {"a": [1, 2.5, None, True, {"b": ("x",)}]}
    params = SamplingParams(extra_args=given)
    given["a"].append("later")
    assert params.extra_args == {"a": [1, 2.5, None, True, {"b": ["x"]}]}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.clone() == params.snapshot() == params
    nested: list[object] = []
    for _ in range(100):
        nested = [nested]
    for bad, message in (
        ([1], r"extra_args=\[1\] isn't a dict"),
        ({1: 2}, "extra_args has the key 1"),
        ({"a": [1, {2}]}, r"extra_args\['a'\]\[1\]=\{2\} isn't a value as in JSON"),
        ({"a": float("nan")}, r"extra_args\['a'\]=nan isn't finite"),
        ({"a": 1 << 64}, r"extra_args\['a'\]=18446744073709551616 isn't"),
        ({"a": nested}, "nested in more than 64 levels"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            SamplingParams(extra_args=bad)  # pyright: ignore[reportArgumentType]


def test_kinds_of_outputs_and_watermarks_are_checked() -> None:
    assert SamplingParams(watermarking=False).output_kind is RequestOutputKind.CUMULATIVE
    for bad, message in (
        ({"output_kind": 1}, "output_kind=1 isn't a RequestOutputKind"),
        ({"watermarking": True}, "watermarking=True isn't supported"),
        ({"stream_interval": 0}, "stream_interval=0 isn't at least 1"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            SamplingParams(**bad)  # pyright: ignore[reportArgumentType]


def test_equivalent_forms_are_normalised() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(stop="\n") == SamplingParams(stop=["\n"])
    assert SamplingParams(stop="\n").stop_strings == ["\n"]
    assert SamplingParams().stop_strings == []


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0.0, True), (0, True), (1e-6, True), (1e-5, False), (1, False)]
)
def test_greedy_is_a_temperature_of_zero_or_nearly(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


@pytest.mark.parametrize(
    "accepted",
    [
        {"top_p": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 0.1},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"max_tokens": None, "min_tokens": 100},
        {"min_tokens": 16},
        {"logprobs": 0},
        {"logprobs": -1, "prompt_logprobs": -1},
        {"logit_bias": {5: -1000.0}},
        {"n": 3},
        {"stop_token_ids": []},
        {"stop_token_ids": [1], "detokenize": False},
    ],
)
def test_sampling_params_at_the_limits_are_accepted(accepted: dict[str, Any]) -> None:
    params = SamplingParams(**accepted)
    for name, value in accepted.items():
        assert getattr(params, name) == value


@pytest.mark.parametrize(
    ("refused", "fragments"),
    [
        ({"n": 0}, ["n=0", "at least 1"]),
        ({"n": 2.0}, ["n=2.0", "integer"]),
        ({"n": True}, ["n=True", "integer"]),
        ({"n": 2, "temperature": 0.0}, ["n=2", "temperature=0.0", "greedy"]),
        ({"temperature": -0.1}, ["temperature=-0.1", "at least 0"]),
        ({"temperature": float("nan")}, ["temperature=nan"]),
        ({"temperature": float("inf")}, ["temperature=inf"]),
        ({"temperature": "hot"}, ["temperature='hot'", "number"]),
        ({"top_p": 0.0}, ["top_p=0.0", "(0.0, 1.0]"]),
        ({"top_p": 1.1}, ["top_p=1.1", "(0.0, 1.0]"]),
        ({"top_k": -2}, ["top_k=-2"]),
        ({"min_p": -0.5}, ["min_p=-0.5"]),
        ({"top_n_sigma": -1.0}, ["top_n_sigma=-1.0", "at least 0"]),
        ({"presence_penalty": 2.5}, ["presence_penalty=2.5", "[-2.0, 2.0]"]),
        ({"frequency_penalty": -2.5}, ["frequency_penalty=-2.5"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty=0.0", "above 0.0"]),
        ({"repetition_penalty": -1.0}, ["repetition_penalty=-1.0"]),
        ({"seed": -2}, ["seed=-2"]),
        ({"seed": MAX_SEED + 1}, [f"seed={MAX_SEED + 1}"]),
        ({"max_tokens": 0}, ["max_tokens=0", "at least 1"]),
        ({"max_tokens": 2**70}, [f"max_tokens={2**70}"]),
        ({"stop_token_ids": [2**63]}, ["stop_token_ids", str(2**63)]),
        ({"stop": ["\ud800"]}, ["stop", "surrogate"]),
        ({"min_tokens": -1}, ["min_tokens=-1"]),
        ({"min_tokens": 17}, ["min_tokens=17", "max_tokens=16"]),
        ({"logprobs": -2}, ["logprobs=-2"]),
        ({"prompt_logprobs": -2}, ["prompt_logprobs=-2"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids=-1"]),
        ({"allowed_token_ids": []}, ["allowed_token_ids=[]"]),
        ({"allowed_token_ids": ["a"]}, ["allowed_token_ids='a'", "integer"]),
        ({"logit_bias": {-1: 1.0}}, ["logit_bias key=-1"]),
        ({"logit_bias": {3: float("inf")}}, ["logit_bias[3]=inf", "finite"]),
        ({"stop": ""}, ["stop contains ''", "non-empty"]),
        ({"stop": ["a", 5]}, ["stop contains 5", "string"]),
        ({"bad_words": [""]}, ["bad_words contains ''"]),
        ({"stop": "a", "detokenize": False}, ["stop=['a']", "detokenize=False", "stop_token_ids"]),
    ],
)
def test_impossible_sampling_params_are_refused_by_name(refused: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**refused)
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_each_flag_takes_only_true_and_false() -> None:
    flags = [field.name for field in msgspec.structs.fields(SamplingParams) if isinstance(field.default, bool)]
    assert len(flags) >= 5
    for flag in flags:
        refused: dict[str, Any] = {flag: 1}
        with pytest.raises(InvalidRequest, match=f"{flag}=1 isn't True or False"):
            SamplingParams(**refused)


def test_a_clone_of_sampling_params_shares_no_list() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={2: 1.0}, max_tokens=None, top_p=0.5)
    clone = params.clone()
    assert clone == params
    assert params.stop_token_ids is not None
    params.stop_token_ids.append(9)
    assert clone.stop_token_ids == [1]


def test_sampling_params_are_encoded_in_few_bytes_and_equal_when_decoded() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=128, logit_bias={2: 1.0})
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params
    assert len(data) < 64, "defaults aren't sent"
