"""vLLM's server started from Python: its flags and arguments are those of `raycore serve`."""

from __future__ import annotations

import argparse
import asyncio
import threading

import pytest

from raycore.cli.main import build_parser
from raycore.compat import server
from raycore.compat.arguments import FlexibleArgumentParser
from raycore.errors import InvalidConfig

FLAGS = [
    *("--model", "a/model", "--served-model-name", "one", "two", "--port", "8123", "--host", "::1", "--seed", "3"),
    *("--no-enable-prefix-caching", "--api-key", "secret", "--kv-events-config", '{"enable_kv_cache_events": true}'),
    *("--shutdown-timeout", "5", "--disable-log-stats", "--trust-remote-code", "--api-server-count", "2"),
]


def parsed(flags, parser=None):
    return server.make_arg_parser(parser or FlexibleArgumentParser()).parse_args(flags)


def served(monkeypatch, args):
    """What the command gets."""
    came = []
    monkeypatch.setattr(server, "run", lambda args: came.append(args) or 0)
    asyncio.run(server.run_server(args))
    return vars(came[0])


@pytest.mark.parametrize("flags", [[], FLAGS, ["a/model", "--tensor-parallel-size", "2"]])
@pytest.mark.parametrize("kind", [FlexibleArgumentParser, argparse.ArgumentParser])
def test_the_server_gets_what_the_command_gets(monkeypatch, kind, flags):
    expected = vars(build_parser().parse_args(["serve", *flags]))
    assert served(monkeypatch, parsed(flags, kind())) == expected


@pytest.mark.parametrize("flag", [each for each in server._flags() if each.action.nargs], ids=lambda flag: flag.name)
def test_a_flag_with_several_values_is_taken(flag):
    parser = server.make_arg_parser(argparse.ArgumentParser())
    args = parser.parse_args([])
    (action,) = (each for each in parser._actions if each.dest == flag.name)
    action(parser, args, ["a.b"], None)
    assert getattr(args, flag.name) == ["a.b"]


def test_values_come_as_a_list_or_a_tuple(monkeypatch):
    args = parsed(["--middleware", "a.b", "--middleware", "c.d"])
    assert served(monkeypatch, args)["server.middleware"] == ["a.b", "c.d"]
    args.middleware = ()
    assert served(monkeypatch, args) == served(monkeypatch, parsed([]))


def test_parsed_arguments_have_vllms_names_and_defaults():
    args = parsed(["--max_model_len", "512"])
    assert (args.host, args.port, args.max_model_len, args.tensor_parallel_size) == ("127.0.0.1", 8000, 512, 1)
    assert args.model_tag is None
    assert args.trust_remote_code is False


def test_arguments_that_a_program_changes_count(monkeypatch):
    args = parsed([])
    args.model, args.port, args.not_of_the_server = "a/model", 8001, True
    found = served(monkeypatch, args)
    assert (found["engine.model"], found["listen.port"]) == ("a/model", 8001)
    assert served(monkeypatch, argparse.Namespace(model="a/model"))["engine.model"] == "a/model"


def test_a_parser_keeps_its_own_flags():
    parser = FlexibleArgumentParser()
    parser.add_argument("--port", default=1, type=int)
    parser.add_argument("--mine", action="store_true")
    args = parsed(["--mine", "--port", "2", "--host", "::1"], parser)
    assert (args.mine, args.port, args.host) == (True, 2, "::1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--distributed-executor-backend", "external_launcher"], "distributed_executor_backend"),
        (["--api-server-count", "0"], r"api_server_count=0 isn't in \[1, "),
        (["--lora-modules", "a=b"], "give --enable-lora"),
        (["--headless", "--api-server-count", "2"], "--api-server-count 2: with --headless"),
        (["--headless", "--data-parallel-rank", "0"], "--headless: with "),
        (["--ssl-certfile", "/no/such"], "/no/such"),
        (["--middleware", "no_such_module.x"], "no_such_module"),
    ],
)
def test_what_could_never_start_is_refused_before(flags, message):
    with pytest.raises(InvalidConfig, match=message):
        server.validate_parsed_serve_args(parsed(flags))
    server.validate_parsed_serve_args(parsed(FLAGS))
    server.validate_parsed_serve_args(parsed(["--headless"]))


def test_a_server_that_fails_ends_the_program_with_its_status(monkeypatch):
    monkeypatch.setattr(server, "run", lambda args: 1)
    with pytest.raises(SystemExit) as raised:
        asyncio.run(server.run_server(parsed([])))
    assert raised.value.code == 1


def test_a_server_is_refused_where_no_signal_could_end_it():
    came = []

    def attempt():
        try:
            asyncio.run(server.run_server(parsed([])))
        except InvalidConfig as error:
            came.append(str(error))

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(60)
    assert came == ["run_server(): call it on the main thread, which gets the signals that end a server"]


def test_options_of_uvicorn_are_refused_by_name():
    with pytest.raises(InvalidConfig, match=r"run_server\(\) takes no log_config"):
        asyncio.run(server.run_server(parsed([]), log_config=None))
