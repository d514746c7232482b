"""What docs/production.md tells people to type and to configure, as far as raycore can say whether it is right."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycore.cli.engine_options import chosen_listen_options, chosen_server_options
from raycore.cli.main import build_parser
from raycore.server.endpoints import Endpoint, Rule, paths_with
from raycore.server.listen_options import ListenOptions
from raycore.server.options import ServerOptions
from raycore.server.process.serving import _KEEP_ALIVE_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/production.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[list[str]]:
    """The words of each command of raycore in the page, without its name."""
    for line in "".join(blocks("bash")).splitlines():
        if re.match(r"(RAYCORE_API_KEY=\$\(.*\) )?raycore ", line):
            yield shlex.split(line[line.index("raycore ") :])[1:]
        elif line.startswith("docker run"):
            _, image, rest = line.partition("raycore:0.1.0")
            words = shlex.split(rest)
            assert image
            yield words if words[:1] == ["generate"] else ["serve", *(word for word in words if word != "bash")]
    (unit,) = blocks("ini")
    yield shlex.split(re.search(r"^ExecStart=\S+/raycore (.*)$", unit, re.MULTILINE)[1])
    for container in deployment()["spec"]["template"]["spec"]["containers"]:
        yield ["serve", *container["args"]]


def deployment() -> dict[str, Any]:
    (found,) = [each for text in blocks("yaml") for each in [yaml.safe_load(text)] if "kind" in each]
    return found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The page's file of flags."""
    file = tmp_path / "serve.yaml"
    file.write_text(next(text for text in blocks("yaml") if "/etc/raycore/serve.yaml" in text))
    return file


def parsed(words: list[str], config: Path) -> argparse.Namespace:
    return build_parser().parse_args([str(config) if word == "/etc/raycore/serve.yaml" else word for word in words])


def test_the_commands_are_commands_of_raycore(config):
    all_words = list(commands())
    assert len(all_words) >= 10
    for words in all_words:
        args = parsed(words, config)
        if words[0] == "serve":
            chosen_server_options(args, "m")


def test_flags_in_the_text_are_flags_of_serve():
    known = {flag for action in _serve().actions for flag in action.option_strings}
    of_others = {"--shm-size", "--user", "--read-only", "--tmpfs", "--time", "--health-cmd", "--no-healthcheck"}
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    named = {flag for text in re.findall(r"`([^`]*)`", prose) for flag in re.findall(r"--[a-z][\w-]+", text)}
    assert named - of_others - known == set()


def _serve() -> Any:
    (commands,) = [action.choices for action in build_parser().actions if action.choices and "serve" in action.choices]
    return commands["serve"]


def test_the_table_of_limits_has_the_defaults():
    http, listen = ServerOptions(("m",)), ListenOptions()
    headers = f"{(listen.h11_max_incomplete_event_size or 0) >> 10} KiB, {listen.h11_max_header_count}"
    for flag, default in (
        ("max-concurrent-requests", f"{http.max_streams}"),
        ("max-body-bytes", f"{http.max_body_bytes >> 20} MiB"),
        ("body-timeout-s", f"{http.body_timeout_s:g} s"),
        ("h11-max-incomplete-event-size", headers),
        ("header-timeout-s", f"{listen.header_timeout_s:g} s"),
        ("max-stored-responses", f"{http.max_stored_responses:,}, {http.max_stored_response_bytes >> 20} MiB"),
    ):
        assert re.search(rf"^\| .* \| `--{flag}`.* \| {re.escape(default)} \| ", PAGE, re.MULTILINE), flag


def test_paths_without_a_key_are_those_that_the_page_names():
    (named,) = re.findall(r"These paths need none: (.*?)\.", PAGE, re.DOTALL)
    assert re.findall(r"`(\S+)`", named) == list(dict.fromkeys(paths_with(Rule.NO_KEY)))


def test_the_proxys_numbers_follow_from_the_servers():
    (proxy,) = blocks("nginx")
    assert int(re.search(r"keepalive_timeout (\d+)s", proxy)[1]) < _KEEP_ALIVE_S
    assert int(re.search(r"client_max_body_size (\d+)m", proxy)[1]) << 20 == ServerOptions(("m",)).max_body_bytes
    assert f"127.0.0.1:{ListenOptions().port};" in proxy


def test_what_ends_a_server_gives_its_requests_their_time(config):
    (unit,) = blocks("ini")
    of_file = parsed(["serve", "--config", "/etc/raycore/serve.yaml"], config)
    assert int(re.search(r"TimeoutStopSec=(\d+)", unit)[1]) > of_file.shutdown_timeout
    pod = deployment()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    drain_s = build_parser().parse_args(["serve", *container["args"]]).shutdown_timeout
    assert pod["terminationGracePeriodSeconds"] > drain_s + container["lifecycle"]["preStop"]["sleep"]["seconds"]


def test_probes_ask_paths_that_need_no_key_and_give_a_load_its_time():
    (container,) = deployment()["spec"]["template"]["spec"]["containers"]
    startup, ready, alive = (container[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
    asked = {probe["httpGet"]["path"] for probe in (startup, ready, alive)}
    assert asked <= set(paths_with(Rule.NO_KEY))
    assert startup["httpGet"]["path"] == ready["httpGet"]["path"] == Endpoint.HEALTH.path != alive["httpGet"]["path"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 30 * 60
    assert {probe["httpGet"]["port"] for probe in (startup, ready, alive)} == {ListenOptions().port}
    assert container["securityContext"]["runAsNonRoot"]


def test_the_file_of_flags_says_where_the_server_listens(config):
    args = parsed(["serve", "--config", "/etc/raycore/serve.yaml"], config)
    assert chosen_listen_options(args).port == ListenOptions().port
    assert vars(args)["engine.data_parallel_size"] == 2
