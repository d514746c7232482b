"""Time to the first token and tokens a second through Ray Serve, and through `raycore serve` with the same engine.

The two take turns, each with an engine of its own, in the order of the rounds. With `--rolling-update`, the
application is deployed again and again while streams run; with `--autoscaling`, queued tokens add a replica, and rest
removes it. With RAY_SERVE_ENABLE_HA_PROXY=1, HAProxy sends requests to the replicas' own ports. The exit status is 1 if
a request failed, if no replica came or went, or if Serve's median is more than `--max-delay-ms` above the other.

    python benchmarks/ray_serve.py CHECKPOINT
    RAY_SERVE_ENABLE_HA_PROXY=1 python benchmarks/ray_serve.py CHECKPOINT
    python benchmarks/ray_serve.py CHECKPOINT --rolling-update
    python benchmarks/ray_serve.py CHECKPOINT --autoscaling
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import ray
from common import finish_load, median, start_load, table
from ray import serve

from raycore.demo import demo_model_path
from raycore.serve import build_openai_app, queued_tokens_policy

NAME = "model"
_START_TIMEOUT_S = 300.0
_LOOK_S = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(demo_model_path()))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--num-cpus", type=int, default=2, help="CPUs of the local Ray cluster")
    parser.add_argument("--max-delay-ms", type=float, default=5.0)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--rolling-update", action="store_true")
    mode.add_argument("--autoscaling", action="store_true")
    args = parser.parse_args()
    if args.rolling_update:
        is_good = _under_load(args, _update_often, {"num_replicas": 2})
    elif args.autoscaling:
        scaling = {
            "min_replicas": 1,
            "max_replicas": 2,
            "upscale_delay_s": 2,
            "downscale_delay_s": 5,
            "look_back_period_s": 5,
            "metrics_interval_s": 1,
            # so that only queued tokens count
            "target_ongoing_requests": 1e9,
            "policy": queued_tokens_policy(args.prompt_tokens * 8),
        }
        is_good = _under_load(args, _watch_replicas, {"autoscaling_config": scaling})
    else:
        is_good = _compare(args)
    sys.exit(not is_good)


def _compare(args: argparse.Namespace) -> bool:
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for way, running in (("Serve", _serve_application), ("raycore serve", _server)):
            with running(args, {}) as url:
                for streams in args.streams:
                    _load(url, args, streams, min(3.0, args.seconds))  # warms up
                    found.setdefault((way, streams), []).append(_load(url, args, streams, args.seconds))
    rows = [["way", "streams", "median time to first token, ms", "tokens/s", "errors"]]
    is_good = True
    for streams in args.streams:
        values: dict[str, float] = {}
        for way in ("Serve", "raycore serve"):
            runs = found[way, streams]
            values[way] = median([run["ttft_ms"]["p50"] for run in runs])
            errors = sum(run["errors"] for run in runs)
            rate = median([run["tokens_per_s"] for run in runs])
            rows.append([way, str(streams), f"{values[way]:.1f}", f"{rate:.1f}", str(errors)])
            is_good &= errors == 0
        delay_ms = values["Serve"] - values["raycore serve"]
        rows.append(["difference", str(streams), f"{delay_ms:+.1f}", "", ""])
        is_good &= delay_ms <= args.max_delay_ms
    print(table(rows))
    return is_good


def _under_load(args: argparse.Namespace, disturb: Any, deployment: dict[str, Any]) -> bool:
    streams = max(args.streams)
    with _serve_application(args, deployment) as url:
        client = start_load(url, NAME, args, streams, args.seconds)
        told = disturb(args, deployment, client)
        found = finish_load(client, _START_TIMEOUT_S)
    print(f"{found['requests']} requests of {streams} streams, {found['errors']} errors; {told}")
    for error in found["first_errors"]:
        print(f"  {error}")
    return found["errors"] == 0 and found["requests"] > 0


def _update_often(args: argparse.Namespace, deployment: dict[str, Any], client: subprocess.Popen[str]) -> str:
    number = 0
    while client.poll() is None and number < args.rounds:
        number += 1
        time.sleep(2.0)
        _deploy(args, deployment, max_num_seqs=256 - number)
    return f"{number} updates"


def _watch_replicas(args: argparse.Namespace, deployment: dict[str, Any], client: subprocess.Popen[str]) -> str:
    seen = [_num_replicas()]
    rest_s = None
    while rest_s is None or time.monotonic() < rest_s + 60.0:
        time.sleep(_LOOK_S)
        if rest_s is None and client.poll() is not None:
            rest_s = time.monotonic()
        now = _num_replicas()
        if now != seen[-1]:
            seen.append(now)
        if rest_s is not None and now == 1:
            break
    if len(seen) < 3 or seen[-1] != 1:
        raise RuntimeError(f"the number of replicas was {', '.join(map(str, seen))}")
    return f"replicas: {', '.join(map(str, seen))}"


def _num_replicas() -> int:
    (application,) = serve.status().applications.values()
    (deployment,) = application.deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


# ---- servers


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {"max_model_len": args.prompt_tokens + args.new_tokens}


def _deploy(args: argparse.Namespace, deployment: dict[str, Any], **options: Any) -> None:
    model = {
        "model_loading_config": {"model_id": NAME, "model_source": args.checkpoint},
        "engine_kwargs": _engine_options(args) | options,
        "deployment_config": deployment,
    }
    serve.run(build_openai_app({"llm_configs": [model]}), name=NAME, route_prefix="/")


@contextmanager
def _serve_application(args: argparse.Namespace, deployment: dict[str, Any]) -> Iterator[str]:
    port = _free_port()
    ray.init(address="local", num_cpus=args.num_cpus, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        # few at a time, so that prompts are queued
        _deploy(args, deployment, **({"max_num_seqs": 8} if args.autoscaling else {}))
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


@contextmanager
def _server(args: argparse.Namespace, _: dict[str, Any]) -> Iterator[str]:
    port = _free_port()
    options = ["--max-model-len", str(_engine_options(args)["max_model_len"])]
    command = ["-m", "raycore", "serve", args.checkpoint, "--served-model-name", NAME, "--port", str(port), *options]
    server = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not _is_healthy(url):
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"`raycore serve` didn't start: status {server.poll()}")
            time.sleep(_LOOK_S)
        yield url
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(60)
        if server.poll() is None:
            server.kill()
            server.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def _load(url: str, args: argparse.Namespace, streams: int, seconds: float) -> dict[str, Any]:
    return finish_load(start_load(url, NAME, args, streams, seconds), _START_TIMEOUT_S)


if __name__ == "__main__":
    main()
