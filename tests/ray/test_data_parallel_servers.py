"""Servers that divide the ranks of a deployment: each has its own, and the loss of one costs the others nothing."""

from __future__ import annotations

import subprocess

import pytest
from chaos.servers import Deployment, expected_answers, lose_a_node
from programs import Program, raycore

from raycore.demo import demo_model_path, held_out_problems


@pytest.mark.timeout(300)
def test_a_lost_node_takes_only_its_servers_requests_with_it():
    prompts = [prompt for prompt, _ in held_out_problems(2, 24)]
    deployment = Deployment(2, 1)
    try:
        first, second = deployment.servers
        assert deployment.ranks() == {first.ip: {"0"}, second.ip: {"1"}}
        answers = lose_a_node(deployment, prompts, concurrency=4, lost=1)
        assert deployment.ranks() == {first.ip: {"0"}}
    finally:
        deployment.close()
    assert answers == expected_answers(prompts)
    assert second.answered["before"]
    assert not second.answered["after"]
    assert second.refused
    assert not first.refused
    assert first.process.returncode == 0


@pytest.mark.timeout(300)
def test_a_node_without_a_server_follows_the_engine_of_another():
    deployment = Deployment(1, 1)
    (server,) = deployment.servers
    command = [*raycore("serve", str(demo_model_path()), "--headless"), "--data-parallel-start-rank", "1"]
    try:
        with Program([*command, "-dpl", "1", "-dp", "2"], environment={"RAY_ADDRESS": deployment.address}) as follower:
            follower.wait_for("this node needs no process of its own")
            server.process.terminate()
            assert follower.wait_for_exit(60) == 0
            follower.wait_for("has ended")
    finally:
        deployment.close()


def test_a_node_without_a_server_says_that_no_engine_came():
    environment = ["env", "RAY_ADDRESS=127.0.0.1:1"]
    run = subprocess.run(
        [*environment, *raycore("serve", "--headless", "--init-timeout-s", "1")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert "no Ray cluster at address '127.0.0.1:1': no process listens on this port" in run.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--api-server-count", "2"], "--api-server-count 2: with --headless, no server runs here"),
        (["--data-parallel-rank", "1", "-dp", "2"], "each node has a server: omit it"),
        (["--api-server-nodes", "all"], "--api-server-nodes all: give it to the server"),
    ],
)
def test_flags_that_contradict_headless_are_named(flags, named, capsys):
    from raycore.cli.main import main

    assert main(["serve", "--headless", *flags]) == 1
    assert named in capsys.readouterr().err
