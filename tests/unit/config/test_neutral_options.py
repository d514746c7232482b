"""Options of vLLM whose values mean nothing here, or mean the same in another form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycore.cli.main import main
from raycore.config import EngineConfig, resolve
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig


def resolved(**options: Any) -> EngineConfig:
    return resolve(demo_model_path(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"trust_remote_code": True, "code_revision": "main"},
        {"distributed_executor_backend": "mp"},
        {"distributed_executor_backend": "uni"},
        {"tokenizer_mode": "slow"},
        {"max_model_len": None, "seed": None, "swap_space": 4, "cpu_offload_gb": 0},
        {"load_format": "safetensors"},
        {"load_format": "runai_streamer"},
        {"compilation_config": 3, "enforce_eager": False},
        {"compilation_config": {"level": 3}, "optimization_level": 2},
        {"generation_config": "auto", "override_generation_config": {}},
        {"dtype": "auto", "quantization": None, "kv_cache_dtype": "auto"},
    ],
    ids=str,
)
def test_values_that_need_nothing_change_nothing(options: dict[str, Any]) -> None:
    assert resolved(**options) == resolved()


@pytest.mark.parametrize("given", ["auto", -1, "-1"])
def test_an_automatic_length_is_the_checkpoints_until_memory_is_known(given: str | int) -> None:
    config = resolved(max_model_len=given)
    assert config.scheduler.fits_max_model_len
    assert not resolved().scheduler.fits_max_model_len
    assert config.model == resolved().model


@pytest.mark.parametrize(
    "options",
    [
        {"spec_method": "ngram", "spec_tokens": 3},
        {"spec_method": "ngram", "speculative_config": {"num_speculative_tokens": 3}},
        {"spec_tokens": 3, "speculative_config": '{"method": "ngram"}'},
    ],
    ids=str,
)
def test_short_options_of_speculation_are_its_settings(options: dict[str, Any]) -> None:
    assert resolved(**options) == resolved(speculative_config={"method": "ngram", "num_speculative_tokens": 3})


def test_a_setting_of_speculation_is_given_once() -> None:
    with pytest.raises(InvalidConfig, match="has 'num_speculative_tokens', and its short option is given"):
        resolved(spec_tokens=4, speculative_config={"method": "ngram", "num_speculative_tokens": 3})


def test_another_directory_may_describe_the_model(tmp_path: Path) -> None:
    config = json.loads((Path(demo_model_path()) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    found = resolved(hf_config_path=str(tmp_path))
    assert found.model.max_model_len == 100
    assert found.model.model == resolved().model.model
    with pytest.raises(InvalidConfig, match=r"hf_config_path=.* can't be used with a model that transformers' code"):
        resolved(hf_config_path=str(tmp_path), model_impl="transformers")


def test_without_a_tokenizer_its_files_are_not_needed(tmp_path: Path) -> None:
    for path in Path(demo_model_path()).iterdir():
        if "token" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    for name in ("skip_tokenizer_init", "tokens_only"):
        assert resolve(str(tmp_path), **{name: True}).model.skip_tokenizer_init
    with pytest.raises(InvalidConfig, match="skip_tokenizer_init=True can't be used with prepare_structured_outputs"):
        resolve(str(tmp_path), skip_tokenizer_init=True, prepare_structured_outputs=True)


@pytest.mark.parametrize(
    ("given", "number"), [("256", 256), ("1k", 1000), ("1K", 1024), ("0.5k", 500), (" 1k ", 1000), (300, 300)]
)
def test_numbers_have_short_forms(given: str | int, number: int) -> None:
    config = resolved(max_model_len=given, max_num_batched_tokens=given, kv_cache_memory_bytes=given, max_num_seqs=8)
    assert config.model.max_model_len == config.scheduler.max_model_len == number
    assert config.scheduler.max_num_batched_tokens == config.cache.kv_cache_memory_bytes == number


@pytest.mark.parametrize("given", ["", "k", "4kk", "4 k", "1.0001k", "0.5K", "-5", "1e3", "auto!", 0, -2, True])
@pytest.mark.parametrize("name", ["max_model_len", "max_num_batched_tokens"])
def test_other_texts_are_refused_by_the_options_name(name: str, given: str | int) -> None:
    with pytest.raises(InvalidConfig, match=f"{name}=.* isn't a positive integer, also as 4k or 4K"):
        resolved(**{name: given})


def test_flags_take_short_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "1", "--max-model-len", "1x"])
    assert "max_model_len='1x' isn't a positive integer, also as 4k or 4K, 'auto' or -1" in capsys.readouterr().err
    assert main(["generate", "1", "--max-model-len", "1M"]) == 1
    assert "max_model_len=1048576 is above the checkpoint's maximum" in capsys.readouterr().err
    assert main(["generate", "1", "--max-model-len", "-1", "--max-num-seqs", "8", "--max-num-batched-tokens", "4"]) == 1
    assert "max_num_batched_tokens=4 is below max_num_seqs=8" in capsys.readouterr().err


def test_defaults_of_sampling_come_from_where_the_options_say(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5, "top_k": 7, "do_sample": True}))
    checkpoint = resolved().model.default_sampling_params
    assert resolved(generation_config="vllm").model.default_sampling_params == {}
    assert resolved(generation_config="vllm").model.spec.eos_token_ids == resolved().model.spec.eos_token_ids
    given = resolved(generation_config=str(tmp_path), override_generation_config='{"top_k": 9, "max_new_tokens": 5}')
    assert given.model.default_sampling_params == {"top_p": 0.5, "top_k": 9, "max_tokens": 5}
    given = resolved(override_generation_config={"temperature": 0.25})
    assert given.model.default_sampling_params == checkpoint | {"temperature": 0.25}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": "nowhere"}, "generation_config='nowhere' isn't 'auto', 'vllm' or a directory"),
        ({"override_generation_config": {"nonsense": 1}}, "override_generation_config has 'nonsense': known are"),
        ({"override_generation_config": {"temperature": -1}}, "temperature"),
        ({"override_generation_config": "[1]"}, "override_generation_config='\\[1\\]' isn't"),
        ({"distributed_executor_backend": "external_launcher"}, "distributed_executor_backend='external_launcher'"),
        ({"load_format": "gguf"}, "load_format='gguf', but .* isn't a GGUF file: omit it"),
        ({"quantization": "gguf"}, "quantization='gguf', but .* says that its weights aren't quantized: omit it"),
        ({"tokenizer_mode": "mistral"}, "tokenizer_mode='mistral' is not supported"),
    ],
)
def test_what_would_mean_something_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        resolved(**options)


@pytest.mark.parametrize(
    "given",
    [
        {"method": "ngram"},
        {"method": "[ngram]"},
        {"model": "[ngram]"},
        {"model": "ngram"},
        {"model": "ngram", "method": "ngram"},
        {"method": "ngram_gpu"},
    ],
    ids=str,
)
def test_guesses_by_n_grams_have_several_names(given: dict[str, Any]) -> None:
    config = resolved(speculative_config={**given, "num_speculative_tokens": 3}).speculative_config
    assert config is not None
    assert (config.method, config.model, config.num_speculative_tokens) == ("ngram", None, 3)
