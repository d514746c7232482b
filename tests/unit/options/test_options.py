"""Each option is declared once, and is everywhere: in Python, on the command line, under Ray Serve, in the docs."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import pytest
from msgspec import Meta

from raycore.cli.main import build_parser
from raycore.config import ENGINE_OPTIONS, EngineConfig
from raycore.config.vllm_table import VLLM_OPTIONS, VLLM_SERVER_FLAGS, without_vllm_options
from raycore.errors import InvalidConfig
from raycore.llm import LLM, AsyncLLM
from raycore.options.declared import check_options, option, options_of
from raycore.options.types import EngineOptions
from raycore.server.options import (
    REASONING_PARSERS,
    SERVER_OPTIONS,
    TOOL_CALL_PARSERS,
    LoraModule,
    ServerOptions,
    server_options,
)
from raycore.server.parsers import reasoning, tool_calls
from raycore.server.serve_app import ARGUMENTS

ROOT = Path(__file__).parents[3]

NO_OPTIONS = {"drafter", "spec", "log_level", "SchedulerConfig.max_model_len", "Plugins.chosen", "Plugins.general"} | {
    "MultiModalConfig.max_image_tokens",
    "SchedulerConfig.computes_whole_prompts",
    "SchedulerConfig.fits_max_model_len",
    "ServerOptions.max_logprobs",
    "ParallelConfig.first_rank",
    "ParallelConfig.num_on_own_node",
    "ParallelConfig.num_ranks_of_servers",
    "ParallelConfig.num_ranks_before",
}
"""What is found, or given by the program: the rest of the configuration is for users to choose."""


class Part(msgspec.Struct, frozen=True):
    """One option, whose declaration here is all that there is of it."""

    num_wheels: Annotated[int, Meta(ge=1, le=6), option("Wheels of the wagon.", flags=("-w", "--wheels"))] = 4


def fields_of(struct: type[msgspec.Struct]) -> list[tuple[str, str, Any]]:
    """The fields of a struct, and of those in it, as struct, name and type; but not of a checkpoint's description."""
    found: list[tuple[str, str, Any]] = []
    for name, kind in get_type_hints(struct).items():
        is_part = isinstance(kind, type) and issubclass(kind, msgspec.Struct) and name != "spec"
        found += fields_of(kind) if is_part else [(struct.__name__, name, kind)]
    return found


def flags_of(command: str) -> dict[str, argparse.Action]:
    """What a command takes, by the name under which it is parsed."""
    (commands,) = (each for each in build_parser().actions if isinstance(each.choices, dict))
    return {action.dest: action for action in commands.choices[command].actions if action.option_strings}


@pytest.mark.parametrize(("struct", "options"), [(EngineConfig, ENGINE_OPTIONS), (ServerOptions, SERVER_OPTIONS)])
def test_every_field_is_an_option(struct, options):
    declared = {each.field for each in options.values()}
    missing = {
        name
        for part, name, _ in fields_of(struct)
        if not {name, f"{part}.{name}"} & NO_OPTIONS and name not in declared
    }
    assert missing == set()


def test_every_option_has_a_help_text_and_an_expected_value():
    for each in [*ENGINE_OPTIONS.values(), *SERVER_OPTIONS.values()]:
        assert each.help.endswith("."), each.name
        assert each.expected


@pytest.mark.parametrize("function", [LLM, AsyncLLM, LLM.get_or_create, AsyncLLM.create])
def test_python_takes_every_option_of_an_engine(function):
    parameters = inspect.signature(function).parameters
    assert set(ENGINE_OPTIONS) <= set(parameters)
    assert parameters["block_size"].default == 16
    assert parameters["max_num_seqs"].annotation == int | None
    assert set(EngineOptions.__annotations__) == (set(ENGINE_OPTIONS) | set(VLLM_OPTIONS)) - {"model", "tokenizer"}


@pytest.mark.parametrize("command", ["generate", "serve", "run-batch"])
def test_the_command_line_takes_every_option_of_an_engine(command):
    flags = flags_of(command)
    for name, each in ENGINE_OPTIONS.items():
        action = flags[f"engine.{name}"]
        assert set(action.option_strings) & set(each.flags)
        assert action.help.startswith(each.help)
        if each.is_bool:
            assert f"--no-{each.flags[0].removeprefix('--')}" in action.option_strings
    assert {"-tp", "-dp"} <= {flag for action in flags.values() for flag in action.option_strings}


def test_the_command_line_takes_every_option_of_a_server():
    assert {name.removeprefix("server.") for name in flags_of("serve") if "server." in name} == set(SERVER_OPTIONS)
    batch = {name.removeprefix("server.") for name in flags_of("run-batch") if "server." in name}
    assert batch == {name for name, each in SERVER_OPTIONS.items() if not each.is_http}


def test_ray_serve_takes_every_option_but_secrets():
    assert set(ARGUMENTS) == {*ENGINE_OPTIONS, *SERVER_OPTIONS} - {"api_key"}


def test_the_files_written_from_the_options_declarations_are_up_to_date():
    spec = importlib.util.spec_from_file_location("write_options", ROOT / "docs" / "write_options.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for path, text in script.FILES.items():
        assert path.read_text() == text(), "run docs/write_options.py"
    page = (ROOT / "docs" / "options.md").read_text()
    for name in (*ENGINE_OPTIONS, *SERVER_OPTIONS, *VLLM_OPTIONS, *VLLM_SERVER_FLAGS):
        assert f"`{name}`" in page


def test_no_two_options_have_a_name_or_a_flag_in_common():
    options = [*ENGINE_OPTIONS.values(), *SERVER_OPTIONS.values(), *VLLM_OPTIONS.values(), *VLLM_SERVER_FLAGS.values()]
    names = [each.name for each in options]
    flags = [flag for each in options for flag in each.flags]
    assert len(names) == len(set(names))
    assert len(flags) == len(set(flags))


def test_the_parser_options_list_exactly_the_existing_parsers():
    assert set(TOOL_CALL_PARSERS) == set(tool_calls.PARSERS)
    assert set(REASONING_PARSERS) == set(reasoning.PARSERS)
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(InvalidConfig, match=f"{name}='granite' is not supported: use .*'qwen3"):
            ServerOptions(("m",), **{name: "granite"})


def test_a_new_option_needs_only_its_declaration():
    (wheels,) = options_of(Part, "Wagon")
    assert (wheels.name, wheels.default, wheels.group, wheels.flags) == ("num_wheels", 4, "Wagon", ("-w", "--wheels"))
    assert wheels.annotation is int
    assert wheels.parse("6") == 6
    assert wheels.check(None) == 4
    for value in (0, 7, 2.0, True, "four"):
        with pytest.raises(InvalidConfig, match=f"num_wheels={value!r} isn't an integer from 1 to 6"):
            check_options({"num_wheels": wheels}, {"num_wheels": value})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("block_size", "32", 32),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("enable_prefix_caching", "false", False),
        ("enable_prefix_caching", "True", True),
        ("standby_delay_s", "none", None),
        ("standby_delay_s", "3", 3.0),
        ("num_threads", "None", None),
        ("engine_name", "none", "none"),
        ("dtype", "half", "float16"),
        ("served_model_name", "chat", ("chat",)),
        ("reasoning_parser", "none", None),
    ],
)
def test_the_text_of_a_flag_is_parsed_to_its_value(name, text, value):
    assert ARGUMENTS[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("block_size", "many", "block_size='many' isn't an integer from 1 to 1024"),
        ("enable_prefix_caching", "maybe", "enable_prefix_caching='maybe' isn't True or False"),
        ("wait_for_nodes_s", "nan", "wait_for_nodes_s=nan isn't a number of seconds, 0 or more"),
        ("device", "none", "device='none' is not supported: use 'auto', 'cpu' or 'cuda'"),
        (
            "kv_cache_memory_bytes",
            str(10**20),
            f"kv_cache_memory_bytes={10**20} is too large: the largest number is {2**63 - 1}",
        ),
    ],
)
def test_the_text_of_a_flag_that_is_no_valid_value_is_refused(name, text, message):
    with pytest.raises(InvalidConfig, match=message):
        ARGUMENTS[name].parse(text)


def test_a_servers_model_name_is_its_path_unless_served_model_name_is_given():
    assert server_options("/a/model", {}) == ServerOptions(("/a/model",))
    assert server_options("m", {"served_model_name": "chat"}).served_model_names == ("chat",)
    assert server_options("m", {"served_model_name": ["a", "b"]}).served_model_names == ("a", "b")
    chosen = server_options("m", {"max_concurrent_requests": 3, "body_timeout_s": 2})
    assert (chosen.max_streams, chosen.body_timeout_s) == (3, 2)
    with pytest.raises(InvalidConfig, match="unknown option 'max_streams'"):
        server_options("m", {"max_streams": 3})


# ---- adapters


def test_lora_modules_are_given_as_text_or_as_objects():
    expected = LoraModule("a", "/a"), LoraModule("b", "/b=c", "m")
    as_json = '{"name": "b", "path": "/b=c", "base_model_name": "m", "is_3d_lora_weight": false}'
    for given in (["a=/a", as_json], [{"name": "a", "path": "/a"}, json.loads(as_json)], expected):
        assert server_options("m", {"lora_modules": given}).lora_modules == expected
    for given in ("a=/a", {"name": "a", "path": "/a"}, None):
        assert server_options("m", {"lora_modules": given}).lora_modules == (expected[:1] if given else ())
    assert ARGUMENTS["lora_modules"].parse("b=/b=c") == (LoraModule("b", "/b=c"),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a", "lora_modules='a': expected name=path"),
        ("=/a", "lora_modules='=/a': expected name=path"),
        ("a=", "lora_modules='a=': expected name=path"),
        ("{", "isn't a JSON object"),
        ("[1]", "isn't a dict or a JSON object"),
        (7, "lora_modules=7 isn't a dict or a JSON object"),
        ({"name": "a"}, "lora_modules: path is missing"),
        ({"name": "a", "path": ""}, "lora_modules: path='': expected"),
        ({"name": "a", "path": 3}, "lora_modules: path=3: expected a string"),
        ({"name": "a", "path": "/a", "rank": 3}, "lora_modules: unknown setting 'rank'; "),
        ({"name": "a", "path": "/a", "is_3d_lora_weight": True}, "adapters of experts aren't supported"),
        (
            {"name": "a", "path": "/a", "base_model_name": "z"},
            "base_model_name='z' of 'a' isn't a served model name: m",
        ),
        ("m=/a", "the name 'm' is already a served model name"),
        (["a=/a", "a=/b"], "the name 'a' is already another adapter's"),
    ],
)
def test_lora_modules_in_an_unknown_form_are_refused(given, message):
    with pytest.raises(InvalidConfig, match=message):
        server_options("m", {"lora_modules": given})


def test_directories_of_adapters_are_absolute_and_for_administrators():
    admin = {"enable_admin_endpoints": True, "api_key": "secret"}
    chosen = server_options("m", {"allowed_lora_directories": "/a", **admin})
    assert chosen.allowed_lora_directories == ("/a",)
    for given, options, message in (
        ("a", admin, "allowed_lora_directories='a' isn't an absolute path"),
        (["/a", "~/b"], admin, "allowed_lora_directories='~/b' isn't an absolute path"),
        ("/a", {}, "needs enable_admin_endpoints"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            server_options("m", {"allowed_lora_directories": given, **options})


# ---- vLLM's other options


@pytest.mark.parametrize(
    "options",
    [
        {
            "trust_remote_code": False,
            "calculate_kv_scales": False,
            "dcp_kv_cache_interleave_size": 1,
            "enable_chunked_prefill": True,
        },
        {"disable_log_stats": True, "distributed_executor_backend": "ray", "swap_space": 4, "cpu_offload_gb": 0},
        {
            "disable_log_stats": False,
            "disable_custom_all_reduce": True,
            "tokenizer_mode": "auto",
            "code_revision": None,
        },
        {"max_seq_len_to_capture": 8192, "hf_token": "x"},
        {"speculative_model": None, "max_lora_cls_labels": None},
        {"enable_sleep_mode": True},
    ],
)
def test_vllms_options_with_values_of_no_effect_are_accepted(options):
    assert without_vllm_options({"dtype": "auto", **options}) == {"dtype": "auto"}


@pytest.mark.parametrize(
    ("name", "value", "fragments"),
    [
        ("dcp_kv_cache_interleave_size", 8, ["is not supported: context parallelism divides tokens", "1"]),
        ("calculate_kv_scales", True, ["use kv_cache_dtype", "False"]),
        ("enable_chunked_prefill", False, ["chunked prefill is always on"]),
        ("distributed_executor_backend", "external_launcher", ["no other executors", "without torchrun", "'ray'"]),
        ("max_lora_cls_labels", 2, ["heads of models that classify"]),
        ("cpu_offload_gb", 4, ["stay in the device's memory", "0"]),
        ("speculative_model", "draft", ["use speculative_config"]),
    ],
)
def test_vllms_options_with_other_values_are_refused_by_name(name, value, fragments):
    with pytest.raises(InvalidConfig) as raised:
        without_vllm_options({name: value})
    for fragment in (f"{name}={value!r}", *fragments):
        assert fragment in str(raised.value)


# ---- resources


def test_resources_of_workers_are_positive_amounts():
    for given in ({"CPU": 0.5, "a": 1}, '{"CPU": 0.5, "a": 1}'):
        assert ENGINE_OPTIONS["resources_per_worker"].check(given) == {"CPU": 0.5, "a": 1.0}
    for given in ({"CPU": 0}, {"CPU": True}, {"": 1}, {"CPU": "1"}):
        with pytest.raises(InvalidConfig, match="an amount is a positive number"):
            ENGINE_OPTIONS["resources_per_worker"].check(given)
