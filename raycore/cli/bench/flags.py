"""Adds `raycore bench` and its flags to the command line. Imports little, because even `raycore --help` imports it."""

from __future__ import annotations

import argparse
from typing import Any

from raycore.cli.bench.choices import BACKENDS, DATASET_NAMES, SAMPLING_FLAGS
from raycore.cli.engine_options import add_engine_options, add_model_argument
from raycore.cli.parser import Parser

_NO_EFFECT = "No effect"


def add_bench_command(commands: Any) -> None:
    """Add `bench` to the command line."""
    command: Parser = commands.add_parser(
        "bench",
        help="measure a server or an engine",
        description="Measure a running server, or an engine in this process.",
    )
    kinds = command.add_subparsers(required=True, metavar="BENCHMARK")
    _add_serve(kinds)
    _add_throughput(kinds)
    _add_latency(kinds)
    _add_step_times(kinds)


def _serve(args: argparse.Namespace) -> int:
    from raycore.cli.bench.serve import bench_serve

    return bench_serve(args)


def _throughput(args: argparse.Namespace) -> int:
    from raycore.cli.bench.offline import bench_throughput

    return bench_throughput(args)


def _latency(args: argparse.Namespace) -> int:
    from raycore.cli.bench.offline import bench_latency

    return bench_latency(args)


def _step_times(args: argparse.Namespace) -> int:
    from raycore.cli.bench.step_times import bench_step_times

    return bench_step_times(args)


def _add_serve(kinds: Any) -> None:
    command: Parser = kinds.add_parser(
        "serve",
        usage="raycore bench serve [FLAG]...",
        help="latency and throughput of a running server",
        description="Send requests to a running server, and print how long it takes to answer. Only the requests of "
        "--num-warmups don't count.",
    )
    command.set_defaults(command=_serve)
    group = command.add_argument_group("Server")
    add = group.add_argument
    add(
        *("--backend", "--endpoint-type"),
        default="openai",
        choices=[*BACKENDS],
        help="What kind of requests are sent. Default: openai.",
    )
    add("--base-url", default=None, metavar="URL", help="The server's URL. Default: http://HOST:PORT.")
    add("--host", default="127.0.0.1", metavar="HOST", help="Default: 127.0.0.1.")
    add("--port", type=int, default=8000, metavar="N", help="Default: 8000.")
    add("--endpoint", default=None, metavar="PATH", help="Where requests are sent to. Default: by --backend.")
    add("--header", nargs="+", default=[], metavar="NAME=VALUE", help="Headers of all requests.")
    add("--insecure", action="store_true", help="Don't check the server's certificate.")
    add("--model", default=None, metavar="NAME", help="The model. Default: the first that the server lists.")
    add("--served-model-name", default=None, metavar="NAME", help="The model's name in requests. Default: --model.")
    add("--tokenizer", default=None, metavar="DIR", help="Directory of the tokenizer. Default: that of the model.")
    add("--lora-modules", nargs="+", default=[], metavar="NAME", help="Adapters that requests use, at random.")
    add(
        "--lora-assignment",
        default="random",
        choices=["random", "round-robin"],
        help="How adapters are chosen. Default: random.",
    )
    add("--tokenizer-mode", default="auto", help=f"{_NO_EFFECT}: tokenizers are always read from tokenizer.json.")
    add("--trust-remote-code", action="store_true", help=f"{_NO_EFFECT}: code from checkpoints is never run.")
    add("--ready-check-timeout-sec", type=float, default=0.0, metavar="S", help="How long to wait for the server.")
    add_sample_flags(command)
    group = command.add_argument_group("Requests")
    add = group.add_argument
    add("--request-rate", type=float, default=float("inf"), metavar="R", help="Requests per second. Default: inf.")
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1: requests arrive at random, as a Poisson process. Less: in bursts. More: regularly. Default: 1.",
    )
    add("--max-concurrency", type=int, default=None, metavar="N", help="Maximum number of requests at a time.")
    add("--ramp-up-strategy", default=None, choices=["linear", "exponential"], help="How the rate of requests grows.")
    add("--ramp-up-start-rps", type=float, default=None, metavar="R", help="The rate at the start.")
    add("--ramp-up-end-rps", type=float, default=None, metavar="R", help="The rate at the end.")
    add("--num-warmups", type=int, default=0, metavar="N", help="Requests before the measured ones. Default: 0.")
    add("--seed", type=int, default=0, metavar="N", help="Seed of prompts and arrivals. Default: 0.")
    add("--request-id-prefix", default=None, metavar="TEXT", help="Beginning of the X-Request-Id header.")
    add("--ignore-eos", action="store_true", help="Generate as many tokens as asked for, whatever the model ends with.")
    add("--logprobs", type=int, default=None, metavar="N", help="Log probabilities of each token.")
    add("--extra-body", default=None, metavar="JSON", help="Further fields of all requests.")
    for name, kind in SAMPLING_FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=kind, default=None, metavar="X", help=f"The requests' {name}. Default: the server's.")
    add("--profile", action="store_true", help="Have the server record a profile meanwhile.")
    add("--disable-tqdm", action="store_true", help="Show no progress.")
    group = command.add_argument_group("Results")
    add = group.add_argument
    add(
        "--percentile-metrics",
        default=None,
        metavar="NAMES",
        help="Metrics to print, separated by commas: ttft, tpot, itl, e2el, client_queue_time, "
        "e2el_including_client_queue. Default: ttft,tpot,itl; e2el of embeddings.",
    )
    add("--metric-percentiles", default="99", metavar="P", help="Percentiles, separated by commas. Default: 99.")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="Limits of ttft, tpot and e2el for goodput.")
    add("--save-result", action="store_true", help="Write the results to a JSON file.")
    add("--save-detailed", action="store_true", help="Write those of each request, too.")
    add("--append-result", action="store_true", help="Add the results to the file.")
    add("--result-dir", default=None, metavar="DIR", help="Directory of the file. Default: the current one.")
    add("--result-filename", default=None, metavar="NAME", help="Name of the file. Default: from model and time.")
    add("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="Further fields of the results.")
    add("--label", default=None, metavar="TEXT", help="Beginning of the file's name. Default: the backend.")


def _add_throughput(kinds: Any) -> None:
    command: Parser = kinds.add_parser(
        "throughput",
        usage="raycore bench throughput [FLAG]...",
        help="throughput of an engine in this process",
        description="Generate from many prompts at once, and print how many tokens per second that is.",
    )
    command.set_defaults(command=_throughput)
    add_model_argument(command)
    add_sample_flags(command)
    command.add_argument("--n", type=int, default=1, metavar="N", help="Outputs of each prompt. Default: 1.")
    command.add_argument("--backend", default="vllm", choices=["vllm"], help=f"{_NO_EFFECT}: it is always raycore.")
    command.add_argument("--async-engine", action="store_true", help=f"{_NO_EFFECT}: all prompts are sent at once.")
    command.add_argument("--num-warmups", type=int, default=1, metavar="N", help="Prompts before the measured ones.")
    _add_offline(command)


def _add_latency(kinds: Any) -> None:
    command: Parser = kinds.add_parser(
        "latency",
        usage="raycore bench latency [FLAG]...",
        help="latency of a batch on an engine in this process",
        description="Generate from the same batch again and again, and print how long it takes.",
    )
    command.set_defaults(command=_latency)
    add_model_argument(command)
    numbers = {
        "--input-len": (32, "Tokens of each prompt."),
        "--output-len": (128, "Tokens to generate."),
        "--batch-size": (8, "Number of prompts."),
        "--n": (1, "Outputs of each prompt."),
        "--num-iters-warmup": (10, "Batches before the measured ones."),
        "--num-iters": (30, "Measured batches."),
    }
    for flag, (default, text) in numbers.items():
        command.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} Default: {default}.")
    _add_offline(command)


def _add_step_times(kinds: Any) -> None:
    command: Parser = kinds.add_parser(
        "step-times",
        usage="raycore bench step-times --output FILE [FLAG]...",
        help="how long an engine's steps take, for `raycore simulate`",
        description="Measure steps with prompts, decoding sequences and contexts of several sizes, in this process, "
        "and write their times to a file.",
    )
    command.set_defaults(command=_step_times)
    add_model_argument(command)
    add = command.add_argument
    add("--output", required=True, metavar="FILE", help="The file, in JSON.")
    add("--timings", type=int, default=10, metavar="N", help="How often each step is measured. Default: 10.")
    add(
        "--seconds-per-point",
        type=float,
        default=2.0,
        metavar="S",
        help="After so many seconds, a step is measured no more. Default: 2.",
    )
    add_engine_options(command)


def _add_offline(command: Parser) -> None:
    command.add_argument("--use-tqdm-on-load", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    command.add_argument("--output-json", default=None, metavar="FILE", help="File for the results.")
    command.add_argument("--disable-detokenize", action="store_true", help="Generate token ids without their text.")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="Seed of prompts and sampling. Default: 0.")
    add_engine_options(command, without=["--seed"])


def add_sample_flags(command: Parser) -> None:
    """Add the flags that choose the prompts."""
    group = command.add_argument_group("Prompts")
    group.add_argument(
        "--dataset-name",
        default="random",
        metavar="NAME",
        help=f"Where prompts come from: {', '.join(DATASET_NAMES)}. Default: random.",
    )
    group.add_argument("--dataset-path", default=None, metavar="FILE", help="The file with the prompts.")
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="Number of prompts. Default: 1000.")
    group.add_argument(
        "--skip-chat-template",
        action="store_true",
        help="custom: send prompts as they are. Otherwise completions get them in the tokenizer's chat template.",
    )
    group.add_argument(
        "--chat-template-kwargs", default="{}", metavar="JSON", help="custom: variables of the chat template."
    )
    group.add_argument("--no-stream", action="store_true", help=f"{_NO_EFFECT}: files are read whole.")
    group.add_argument("--disable-shuffle", action="store_true", help="Take a file's prompts in order.")
    group.add_argument("--no-oversample", action="store_true", help="Take no prompt of a file twice.")
    texts = {
        "--input-len": "Number of tokens of a prompt, if it has a given one. Default: the dataset's.",
        "--output-len": "Number of tokens to generate. Default: the dataset's.",
        "--random-input-len": "random: tokens of a prompt. Default: 1024.",
        "--random-output-len": "random: tokens to generate. Default: 128.",
        "--random-prefix-len": "random: tokens with which all prompts begin, in addition. Default: 0.",
        "--sharegpt-output-len": "sharegpt: tokens to generate. Default: as many as the answer in the file has.",
        "--custom-output-len": "custom: tokens to generate; -1: the file's output_tokens. Default: 256.",
        "--sonnet-input-len": "sonnet: tokens of a prompt. Default: 550.",
        "--sonnet-output-len": "sonnet: tokens to generate. Default: 150.",
        "--sonnet-prefix-len": "sonnet: tokens with which all prompts begin. Default: 200.",
        "--prefix-repetition-prefix-len": "prefix_repetition: tokens of a prefix. Default: 256.",
        "--prefix-repetition-suffix-len": "prefix_repetition: tokens that follow. Default: 256.",
        "--prefix-repetition-num-prefixes": "prefix_repetition: number of prefixes. Default: 10.",
        "--prefix-repetition-output-len": "prefix_repetition: tokens to generate. Default: 128.",
    }
    for flag, text in texts.items():
        group.add_argument(flag, type=int, default=None, metavar="N", help=text)
    group.add_argument(
        "--random-range-ratio",
        default="0",
        metavar="R",
        help="random: lengths are from 1 - R to 1 + R times those above. A number below 1, or JSON: "
        '{"input": 0.3, "output": 0.5}. Default: 0.',
    )
