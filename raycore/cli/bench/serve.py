"""`raycore bench serve`: sends requests to a running server, and measures its answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import aiohttp
import numpy as np
from tqdm import tqdm

from raycore.checkpoint.gguf.header import is_gguf
from raycore.checkpoint.hub_cache import find_directory
from raycore.cli.bench.choices import BACKENDS, SAMPLING_FLAGS
from raycore.cli.bench.client import RequestResult, Target, send
from raycore.cli.bench.report import DETAILS, GOALS, METRICS, measured, table
from raycore.cli.bench.samples import Sample, samples
from raycore.cli.output import save
from raycore.errors import InvalidCheckpoint, InvalidConfig, RaycoreError
from raycore.options.declared import json_object
from raycore.text.tokenizer import Tokenizer

_REQUEST_TIMEOUT_S = 6 * 3600.0
_CALL_TIMEOUT_S = 60.0
_NUM_SHOWN_ERRORS = 10


@dataclass(frozen=True)
class Traffic:
    """How many requests are sent per second."""

    rate: float = math.inf
    """inf: all at once."""
    burstiness: float = 1.0
    """1: a Poisson process. Intervals have a gamma distribution: less is more bursty, more is more regular."""
    ramp_up: Literal["linear", "exponential"] | None = None
    """How the rate grows from `start_rate` to `end_rate`. None: it is `rate`."""
    start_rate: float = 0.0
    end_rate: float = 0.0

    def rate_of(self, index: int, count: int) -> float:
        """The rate at which request `index` of `count` is sent."""
        if self.ramp_up is None:
            return self.rate
        progress = index / max(count - 1, 1)
        if self.ramp_up == "linear":
            return self.start_rate + (self.end_rate - self.start_rate) * progress
        return self.start_rate * (self.end_rate / self.start_rate) ** progress


def arrival_times_s(traffic: Traffic, count: int, rng: np.random.Generator) -> Sequence[float]:
    """When each request is sent, in seconds from the start.

    At a constant rate, the intervals are scaled so that the last request comes after `count / rate` seconds, whatever
    the random numbers are.
    """
    intervals = [_interval_s(traffic.rate_of(index, count), traffic.burstiness, rng) for index in range(count)]
    times = np.cumsum(intervals)
    if traffic.ramp_up is None and times[-1] > 0:
        times *= count / traffic.rate / times[-1]
    return times.tolist()


def _interval_s(rate: float, burstiness: float, rng: np.random.Generator) -> float:
    if math.isinf(rate):
        return 0.0
    if math.isinf(burstiness):
        return 1 / rate
    return float(rng.gamma(burstiness, 1 / (rate * burstiness)))


def bench_serve(args: argparse.Namespace) -> int:
    """Run the benchmark, print its table, and write its results. Returns the exit status: 1 if all requests failed."""
    traffic, percentiles, selected, goals = _traffic(args), _percentiles(args), _selected(args), _goals(args)
    base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    target = _target(args, base_url)
    metadata = _pairs(args.metadata, "--metadata")
    model, tokenizer_dir = asyncio.run(_found_model(args, base_url, target.headers))
    tokenizer = Tokenizer.from_dir(tokenizer_dir)
    prompts = samples(args, tokenizer)
    if args.num_warmups < 0 or (args.max_concurrency is not None and args.max_concurrency < 1):
        raise InvalidConfig("--num-warmups isn't 0 or more, or --max-concurrency isn't at least 1")
    results, duration_s = asyncio.run(_run(args, base_url, target, model, prompts, traffic))
    for failed in [each.error for each in results if not each.is_success][:_NUM_SHOWN_ERRORS]:
        print(f"failed: {failed}")
    found = measured(
        results,
        duration_s,
        percentiles=percentiles,
        selected=selected,
        goals_ms=goals,
        count_tokens=lambda text: len(tokenizer.encode(text, False)),
        is_pooling=target.kind == "embeddings",
    )
    print(table(found, percentiles, selected, args.max_concurrency, traffic.rate))
    if args.save_result or args.append_result:
        print(f"results: {_save(args, model, tokenizer_dir, traffic, metadata, found)}")
    return 0 if found["completed"] else 1


def _traffic(args: argparse.Namespace) -> Traffic:
    if not args.request_rate > 0 or not args.burstiness > 0:
        raise InvalidConfig(
            f"--request-rate {args.request_rate} and --burstiness {args.burstiness} aren't both positive"
        )
    rates = args.ramp_up_start_rps, args.ramp_up_end_rps
    if args.ramp_up_strategy is None:
        if rates != (None, None):
            raise InvalidConfig("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return Traffic(args.request_rate, args.burstiness)
    if None in rates or not 0 < rates[0] < rates[1] < math.inf:
        raise InvalidConfig("--ramp-up-strategy needs --ramp-up-start-rps above 0, and a higher --ramp-up-end-rps")
    if not math.isinf(args.request_rate):
        raise InvalidConfig("--ramp-up-strategy sets the rate: leave --request-rate out")
    return Traffic(math.inf, args.burstiness, args.ramp_up_strategy, *rates)


def _percentiles(args: argparse.Namespace) -> list[float]:
    try:
        found = [float(each) for each in args.metric_percentiles.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= each <= 100 for each in found):
        raise InvalidConfig(f"--metric-percentiles {args.metric_percentiles}: give numbers from 0 to 100, as in 50,99")
    return found


def _selected(args: argparse.Namespace) -> list[str]:
    kind, _ = BACKENDS[args.backend]
    text = args.percentile_metrics or ("e2el" if kind == "embeddings" else "ttft,tpot,itl")
    names = [each.strip() for each in text.split(",")]
    for name in names:
        if name not in METRICS:
            raise InvalidConfig(f"--percentile-metrics {name}: known are {', '.join(METRICS)}")
    return names


def _goals(args: argparse.Namespace) -> dict[str, float]:
    goals: dict[str, float] = {}
    for each in args.goodput:
        name, _, limit = each.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            goals[name] = -1.0
        if name not in GOALS or not goals[name] >= 0:
            raise InvalidConfig(f"--goodput {each}: give METRIC:MILLISECONDS, with a metric of {', '.join(GOALS)}")
    return goals


def _pairs(given: Sequence[str], flag: str) -> dict[str, str]:
    for each in given:
        if "=" not in each:
            raise InvalidConfig(f"{flag} {each}: give KEY=VALUE")
    return {name.strip(): value.strip() for name, _, value in (each.partition("=") for each in given)}


def _target(args: argparse.Namespace, base_url: str) -> Target:
    kind, path = BACKENDS[args.backend]
    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("RAYCORE_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= _pairs(args.header, "--header")
    body: dict[str, Any] = {}
    if kind != "embeddings":
        body = {name: getattr(args, name) for name in SAMPLING_FLAGS if getattr(args, name) is not None}
        if args.ignore_eos:
            body["ignore_eos"] = True
        if args.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": args.logprobs} if kind == "chat" else {"logprobs": args.logprobs}
    if args.extra_body is not None:
        body |= json_object("--extra-body", args.extra_body)
    return Target(f"{base_url}{args.endpoint or path}", kind, headers, body)


async def _found_model(args: argparse.Namespace, base_url: str, headers: dict[str, str]) -> tuple[str, str]:
    """The model's name in requests, and where its tokenizer is. What isn't given, the server says."""
    name, directory = args.served_model_name or args.model, args.tokenizer or args.model
    if args.ready_check_timeout_sec > 0 or name is None or directory is None:
        listed = await _listed_model(base_url, headers, args)
        name = name or listed["id"]
        directory = directory or listed.get("root") or listed["id"]
    try:
        found = find_directory(directory, "tokenizer.json", of="tokenizer")
    except (InvalidCheckpoint, InvalidConfig) as error:
        raise InvalidConfig(f"{error}; give its directory with --tokenizer") from error
    if not is_gguf(found) and not (found / "tokenizer.json").is_file():
        raise InvalidConfig(f"{found} has no tokenizer.json: give the tokenizer's directory with --tokenizer")
    return name, str(found)


async def _listed_model(base_url: str, headers: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    deadline_s = time.monotonic() + args.ready_check_timeout_sec
    async with _session(args) as session:
        while True:
            try:
                timeout = aiohttp.ClientTimeout(_CALL_TIMEOUT_S)
                async with session.get(f"{base_url}/v1/models", headers=headers, timeout=timeout) as answer:
                    answer.raise_for_status()
                    return (await answer.json())["data"][0]
            except (aiohttp.ClientError, OSError, LookupError, ValueError, asyncio.TimeoutError) as error:
                if time.monotonic() > deadline_s:
                    raise RaycoreError(
                        f"{base_url}/v1/models can't be read ({error}): `raycore serve` starts a server, --base-url or "
                        "--host and --port name another one"
                    ) from error
                await asyncio.sleep(0.5)


@asynccontextmanager
async def _session(args: argparse.Namespace) -> AsyncGenerator[aiohttp.ClientSession, None]:
    connector = aiohttp.TCPConnector(limit=0, ssl=not args.insecure)
    timeout = aiohttp.ClientTimeout(_REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=True) as session:
        yield session


async def _run(
    args: argparse.Namespace,
    base_url: str,
    target: Target,
    model: str,
    prompts: Sequence[Sample],
    traffic: Traffic,
) -> tuple[list[RequestResult], float]:
    """Send all requests. Returns their results, and how many seconds passed from the first until the last answer."""
    limit = asyncio.Semaphore(args.max_concurrency or len(prompts) + args.num_warmups)
    models = _models(args, model, len(prompts))

    async def limited(
        session: aiohttp.ClientSession, sample: Sample, name: str, request_id: str | None = None
    ) -> RequestResult:
        came_s = time.perf_counter()
        async with limit:
            waited_s = time.perf_counter() - came_s
            result = await send(session, target, sample, name, request_id)
        result.queue_time = waited_s
        return result

    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(_session(args))
        if args.num_warmups:
            warm = await asyncio.gather(*(limited(session, prompts[0], model) for _ in range(args.num_warmups)))
            failed = next((each for each in warm if not each.is_success), None)
            if failed is not None:
                raise RaycoreError(f"a request before the measured ones failed: {failed.error}")
        if args.profile:
            await _post(session, f"{base_url}/start_profile", target.headers)
        times_s = arrival_times_s(traffic, len(prompts), np.random.default_rng(args.seed))
        progress = stack.enter_context(tqdm(total=len(prompts), disable=args.disable_tqdm))
        tasks: list[asyncio.Task[RequestResult]] = []
        begun_s = time.perf_counter()
        for sample, name, time_s in zip(prompts, models, times_s, strict=True):
            left_s = begun_s + time_s - time.perf_counter()
            if left_s > 0:
                await asyncio.sleep(left_s)
            request_id = None if args.request_id_prefix is None else f"{args.request_id_prefix}{len(tasks)}"
            task = asyncio.ensure_future(limited(session, sample, name, request_id))
            task.add_done_callback(lambda _: progress.update(1))
            tasks.append(task)
        results = await asyncio.gather(*tasks)
        duration_s = time.perf_counter() - begun_s
        if args.profile:
            await _post(session, f"{base_url}/stop_profile", target.headers)
    return results, duration_s


def _models(args: argparse.Namespace, model: str, count: int) -> list[str]:
    if not args.lora_modules:
        return [model] * count
    if args.lora_assignment == "round-robin":
        return [args.lora_modules[index % len(args.lora_modules)] for index in range(count)]
    return random.Random(args.seed).choices(args.lora_modules, k=count)


async def _post(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
    async with session.post(url, headers=headers, timeout=aiohttp.ClientTimeout(_CALL_TIMEOUT_S)) as answer:
        if answer.status != 200:
            raise RaycoreError(f"{url}: status {answer.status}: {(await answer.text())[:500]}")


def _save(
    args: argparse.Namespace,
    model: str,
    tokenizer_dir: str,
    traffic: Traffic,
    metadata: dict[str, str],
    found: dict[str, Any],
) -> Path:
    """Write the results, with vLLM's keys. Returns the file's path."""
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    rate = "inf" if math.isinf(traffic.rate) else traffic.rate
    if not args.save_detailed:
        found = {name: value for name, value in found.items() if name not in DETAILS}
    saved = {
        "date": date,
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": args.model or model,
        "tokenizer_id": tokenizer_dir,
        "num_prompts": args.num_prompts,
        **metadata,
        "request_rate": rate,
        "burstiness": traffic.burstiness,
        "max_concurrency": args.max_concurrency,
        **found,
    }
    if traffic.ramp_up is not None:
        saved |= {
            "ramp_up_strategy": traffic.ramp_up,
            "ramp_up_start_rps": traffic.start_rate,
            "ramp_up_end_rps": traffic.end_rate,
        }
    limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    base = Path(args.model or model).name
    path = Path(args.result_dir or ".") / (
        args.result_filename or f"{args.label or args.backend}-{rate}qps{limit}-{base}-{date}.json"
    )
    before = path.read_text(encoding="utf-8") if args.append_result and path.is_file() else ""
    save(path, before + ("\n" if before else "") + json.dumps(saved))
    return path
