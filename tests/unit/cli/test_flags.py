"""What the command line takes, and how it refuses the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycore import __version__
from raycore.cli.main import main
from raycore.config import resolve
from raycore.config.profiler import ProfilerConfig
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig
from raycore.parts.drafts.config.speculative import SpeculativeConfig


class StoppedError(InvalidConfig):
    """Ends a command where it would start its engine."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last command gave to its engine."""
    found: dict[str, Any] = {}

    def start(**options: Any) -> None:
        options.pop("_start", None)  # what shows the start to those who wait for the server
        found.update(options)
        raise StoppedError("no engine here")

    monkeypatch.setattr("raycore.llm.LLM", start)
    monkeypatch.setattr("raycore.llm.AsyncLLM", start)
    return found


@pytest.fixture
def command(tmp_path: Path) -> dict[str, list[str]]:
    """The least that each command needs."""
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1"}}\n')
    batch = ["run-batch", "-i", str(requests), "-o", str(tmp_path / "out.jsonl")]
    return {"generate": ["generate", "1 + 1 ="], "serve": ["serve", "--port", "0"], "run-batch": batch}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a command line that can't be read."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["generate", "serve", "run-batch"])
def test_engine_flags_reach_the_engine(name, started, command):
    flags = ["--placement-strategy", "span", "--num-gpu-blocks-override", "7", "--kv-cache-memory-bytes", "4096"]
    flags += ["--num-threads", "2", "--step-timeout-s", "1.5", "--init-timeout-s", "30", "--standby-delay-s", "none"]
    flags += ["--worker-shutdown-timeout-s", "3", "--rank-drain-timeout-s", "4", "--channel-capacity-bytes", "8192"]
    flags += ["--no-enable-prefix-caching", "-tp", "2", "-pp", "3", "--wait-for-nodes", "9", "--engine-seed", "11"]
    assert main([*command[name], *flags]) == 1
    started.pop("use_tqdm_on_load")
    assert started == {
        "model": str(demo_model_path()),
        "placement_strategy": "span",
        "num_gpu_blocks_override": 7,
        "kv_cache_memory_bytes": 4096,
        "num_threads": 2,
        "step_timeout_s": 1.5,
        "init_timeout_s": 30.0,
        "standby_delay_s": None,
        "shutdown_timeout_s": 3.0,
        "drain_timeout_s": 4.0,
        "channel_capacity_bytes": 8192,
        "enable_prefix_caching": False,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "wait_for_nodes_s": 9.0,
        "seed": 11,
    }


def test_seed_is_the_engines_except_in_generate(started, command):
    for name, seeds in (("serve", {"seed": 5}), ("run-batch", {"seed": 5}), ("generate", {})):
        started.clear()
        assert main([*command[name], "--seed", "5"]) == 1
        assert {key: value for key, value in started.items() if key == "seed"} == seeds


def test_raycore_serve_takes_its_model_as_an_argument_or_a_flag(started, command):
    for arguments in (
        ["serve", "/a", "--port", "0"],
        ["serve", "--port", "0", "/a"],
        [*command["serve"], "--model", "/a"],
    ):
        started.clear()
        assert main(arguments) == 1
        assert started["model"] == "/a"


@pytest.mark.parametrize("name", ["generate", "serve", "run-batch"])
def test_flags_may_have_underscores(name, started, command):
    assert main([*command[name], "--max_model_len", "64", "--enable_prefix_caching", "--block_size=32"]) == 1
    assert (started["max_model_len"], started["block_size"], started["enable_prefix_caching"]) == (64, 32, True)


def test_underscores_are_replaced_in_flags_but_not_in_prompts(started, monkeypatch):
    given: list[str] = []
    monkeypatch.setattr("raycore.cli.main._generate", lambda args: given.extend(args.prompts) or 0)
    assert main(["generate", "snake_case", "--", "--also_a_prompt"]) == 0
    assert given == ["snake_case", "--also_a_prompt"]


def test_an_unknown_flag_is_refused_in_one_line_with_the_nearest_flag(capsys):
    assert refused(["serve", "--max-model-length", "64"], capsys) == (
        "raycore serve: error: unknown flag --max-model-length; did you mean --max-model-len? "
        "(`raycore serve --help=all` lists all flags)\n"
    )
    told = refused(["run-batch", "-i", "a", "-o", "b", "--colour=red"], capsys)
    assert "raycore run-batch: error: unknown flag --colour=red (" in told
    assert "did you mean" not in told
    assert "unknown flag --lora; did you mean --lora-modules?" in refused(["serve", "--lora", "a"], capsys)
    assert "unknown command 'genrate'; did you mean generate?" in refused(["genrate"], capsys)
    assert "unknown command 'x'; commands are serve, run-batch, " in refused(["x"], capsys)
    assert "unknown flag --vesion; did you mean --version?" in refused(["--vesion", "completion", "bash"], capsys)


def test_flags_are_not_abbreviated(capsys):
    assert "unknown flag --max-model; did you mean --max-" in refused(["generate", "x", "--max-model", "64"], capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--block-size", "4096"], "block_size=4096 isn't an integer from 1 to 1024"),
        (["--block-size", "big"], "block_size='big' isn't an integer from 1 to 1024"),
        (["--dtype", "int8"], "dtype='int8' is not supported: use 'auto', 'float32'"),
        (["--init-timeout-s", "0"], "init_timeout_s=0.0 isn't a positive number of seconds"),
        (["--quantization", "int3"], "quantization='int3' is not supported: use 'fp8', 'int8', 'gguf', "),
        (
            ["--kv-cache-dtype", "int4"],
            "kv_cache_dtype='int4' is not supported: use 'auto', 'int8_per_token_head', 'fp8'",
        ),
        (["--engine-name", "my engine"], "engine_name='my engine' isn't a name of letters"),
        (["--port", "99999"], "port=99999 isn't an integer from 0 (a free port) to 65535"),
        (["--port", "-5"], "port=-5 isn't an integer from 0 (a free port) to 65535"),
        (["--host", ""], "host='' isn't the name or address of an interface of this machine"),
    ],
)
def test_a_value_that_cannot_work_is_refused_at_once(flags, message, capsys):
    assert message in refused(["serve", *flags], capsys)


def test_flags_of_vllm_without_effect_are_accepted(started, command):
    flags = ["--enable-auto-tool-choice", "--disable-log-requests", "--no-trust-remote-code"]
    flags += ["--distributed-executor-backend", "ray", "--swap-space", "4", "-O3"]
    flags += [
        "--no-return-sampling-mask",
        "--enable-chunked-prefill",
        "--disable-log-stats",
        "--no-calculate-kv-scales",
    ]
    assert main([*command["serve"], *flags]) == 1
    assert set(started) == {"model", "use_tqdm_on_load"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dcp-kv-cache-interleave-size", "8"], "context parallelism divides tokens"),
        (
            ["--calculate-kv-scales"],
            "calculate_kv_scales=True is not supported: all layers store keys and values in the same data type",
        ),
        (["--return-sampling-mask"], "return_sampling_mask=True is not supported: steps take tokens"),
        (
            ["--ec-manager-config", '{"a": 1}'],
            "is not supported: the encoder cache has no settings of its own",
        ),
        (["-n", "2"], "nnodes=2 is not supported: ranks and workers run on Ray"),
        (["--ssl-keyfile", "key.pem"], "ssl_keyfile (--ssl-keyfile) needs ssl_certfile"),
    ],
)
def test_flags_of_vllm_that_ask_for_something_are_refused_by_name(flags, message, started, command, capsys):
    assert main([*command["serve"], *flags]) == 1
    assert started == {}
    told = capsys.readouterr().err
    assert told.startswith("raycore: ")
    assert message in told


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_host_without_an_address_is_refused_before_an_engine_is_started(count, started, capsys):
    assert main(["serve", "--host", "nosuch.invalid", "--api-server-count", count]) == 1
    assert started == {}
    assert "raycore: can't listen on nosuch.invalid:8000: " in capsys.readouterr().err


@pytest.mark.parametrize("address", ["localhost:99999", "localhost", "nosuch.invalid:6379"])
@pytest.mark.parametrize("command", [["status"], ["scale", "-dp", "2"]])
def test_an_address_of_no_cluster_is_refused(command, address, capsys):
    assert main([*command, "--address", address]) == 1
    assert f"raycore: no Ray cluster at address {address!r}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-modules", "sums=/a"], "lora_modules (--lora-modules) needs an engine with enable_lora=True"),
        (["--enable-lora", "--lora-modules", "sums"], "lora_modules='sums': expected name=path, or an object in JSON"),
        (["--enable-lora", "--lora-modules", "a=/a", "a=/b"], "the name 'a' is already another adapter's"),
        (["--enable-lora", "--lora-modules", "m=/a", "--served-model-name", "m"], "the name 'm' is already a served"),
    ],
)
@pytest.mark.parametrize("name", ["serve", "run-batch"])
def test_adapters_that_cannot_be_offered_are_refused_before_an_engine_is_started(
    name, flags, message, started, command, capsys
):
    assert main([*command[name], *flags]) == 1
    assert started == {}
    assert message in capsys.readouterr().err


def test_directories_of_adapters_need_an_engine_with_adapters(started, command, monkeypatch, capsys):
    monkeypatch.setenv("RAYCORE_API_KEY", "secret")
    flags = ["--enable-admin-endpoints", "--allowed-lora-directories", "/adapters"]
    assert main([*command["serve"], *flags]) == 1
    assert started == {}
    assert "allowed_lora_directories (--allowed-lora-directories) needs an engine" in capsys.readouterr().err
    assert main([*command["serve"], *flags, "--enable-lora"]) == 1
    assert started["enable_lora"] is True


@pytest.mark.parametrize("name", ["serve", "run-batch"])
def test_adapters_that_do_not_exist_are_found_before_an_engine_is_started(name, started, command, capsys):
    assert main([*command[name], "--model", demo_model_path(), "--enable-lora", "--lora-modules", "sums=/nowhere"]) == 1
    assert started == {}
    assert "lora_modules: 'sums': '/nowhere' isn't a directory" in capsys.readouterr().err


def test_a_draft_model_that_cant_be_read_is_named(command, tmp_path, capsys):
    """Errors of checkpoints reach the user, as those of options do."""
    file = tmp_path / "draft.bin"
    file.write_bytes(b"GGUF")
    with pytest.raises(SystemExit):
        main([*command["serve"], "--speculative-config", f'{{"model": "{file}", "num_speculative_tokens": 2}}'])
    assert f"--speculative-config: the draft model='{file}' is a GGUF file whose name" in capsys.readouterr().err


def test_a_file_of_flags_may_list_adapters_as_objects(started, command, tmp_path, monkeypatch):
    monkeypatch.setattr("raycore.parts.adapters.server.adapters.check_adapters", lambda engine, options: None)
    file = tmp_path / "flags.yaml"
    file.write_text("enable-lora: true\nlora-modules: [sums=/a, {name: products, path: /b}]\n")
    assert main([*command["serve"], "--config", str(file)]) == 1
    assert started["enable_lora"] is True


def test_objects_in_json_give_a_configuration(started, command, tmp_path):
    """The engine checks what the command line has checked already."""
    flags = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    flags += ["--profiler-config", json.dumps({"profiler": "torch", "torch_profiler_dir": str(tmp_path)})]
    assert main([*command["generate"], *flags]) == 1
    started.pop("use_tqdm_on_load")
    config = resolve(**started)
    assert config.speculative_config == SpeculativeConfig("ngram", 3)
    assert config.profiler_config == ProfilerConfig(str(tmp_path))


def test_raycore_version_prints_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"raycore {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (["completion", "bash"], "WARNING"),
        (["--log-level", "info", "completion", "bash"], "INFO"),
        (["completion", "bash", "--log-level", "debug"], "DEBUG"),
        (["--log-level", "info", "completion", "--log-level", "error", "bash"], "ERROR"),
    ],
)
def test_the_log_level_stands_before_or_after_the_command(arguments, level, monkeypatch, capsys):
    levels: list[str] = []
    monkeypatch.setattr("logging.basicConfig", lambda level, **_: levels.append(level))
    assert main(arguments) == 0
    assert levels == [level]


def test_help_shows_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help=all"])
    told = " ".join(capsys.readouterr().out.split())
    assert "Tokens in a block of the KV cache. Default: 16." in told
    assert "--enable-prefix-caching, --no-enable-prefix-caching" in told
    assert "--trust-remote-code" not in told  # it has no effect


def test_sampling_that_cannot_work_is_refused_before_an_engine_is_started(started, capsys):
    assert main(["generate", "x", "--temperature", "-1"]) == 1
    assert (started, capsys.readouterr().err) == ({}, "raycore: temperature=-1.0 isn't at least 0.0\n")
