"""The engine's options as flags, which are vLLM's."""

from __future__ import annotations

import argparse
from typing import Any

from raycore.errors import InvalidConfig

_OPTIONS = (
    *("tokenizer", "dtype", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"),
    *("gpu_memory_utilization", "tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", "device"),
    *("engine_name", "batch_invariant", "enable_prefix_caching", "load_format", "scheduling_policy", "enforce_eager"),
    *("wait_for_nodes_s", "prepare_structured_outputs"),
)


def add_chat_options(command: argparse.ArgumentParser) -> None:
    """Add what says how conversations become prompts, and answers tool calls and thoughts."""
    command.add_argument("--chat-template", default=None, metavar="FILE_OR_TEXT", help="default: the checkpoint's")
    command.add_argument(
        "--trust-request-chat-template", action="store_true", help="requests may bring chat templates of their own"
    )
    command.add_argument(
        "--tool-call-parser",
        default=None,
        metavar="NAME",
        help="hermes, llama3_json or qwen3_coder; default: found from the chat template",
    )
    command.add_argument(
        "--reasoning-parser",
        default=None,
        metavar="NAME",
        help="deepseek_r1 or qwen3: tell thoughts from content; default: they are left in it",
    )


def add_device_option(command: argparse.ArgumentParser) -> None:
    """Add the device that workers compute on."""
    command.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"], help="default: auto, which is cpu for now"
    )


def add_wait_option(command: argparse.ArgumentParser) -> None:
    """Add what says how long nodes may take to come."""
    command.add_argument(
        "--wait-for-nodes",
        dest="wait_for_nodes_s",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds in which an autoscaler may add nodes for ranks that have no place; default: 0, none",
    )


def add_engine_options(command: argparse.ArgumentParser) -> None:
    """Add a flag for each option."""
    command.add_argument("--tokenizer", default=None, metavar="DIR", help="default: the model's")
    command.add_argument("-tp", "--tensor-parallel-size", type=int, default=1, metavar="N")
    command.add_argument("-pp", "--pipeline-parallel-size", type=int, default=1, metavar="N", help="only 1")
    command.add_argument("-dp", "--data-parallel-size", type=int, default=1, metavar="N")
    command.add_argument("--enable-expert-parallel", action="store_true")
    command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    command.add_argument("--seed", type=int, default=0, metavar="N")
    command.add_argument("--max-model-len", type=int, default=None, metavar="N")
    command.add_argument("--max-num-seqs", type=int, default=None, metavar="N")
    command.add_argument("--max-num-batched-tokens", type=int, default=None, metavar="N")
    command.add_argument("--block-size", type=int, default=None, metavar="N")
    command.add_argument("--gpu-memory-utilization", type=float, default=None, metavar="SHARE")
    command.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=None)
    command.add_argument("--scheduling-policy", default=None, choices=["fcfs", "priority"])
    command.add_argument("--load-format", default=None)
    command.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=None)
    command.add_argument("--batch-invariant", action="store_true", help="a token's bits don't depend on its batch")
    command.add_argument(
        "--prepare-structured-outputs", action="store_true", help="while it starts, not with the first request for them"
    )
    command.add_argument("--engine-name", default=None, metavar="NAME", help="by which `raycore status` finds it")
    add_device_option(command)
    add_wait_option(command)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was chosen, as keyword arguments of `LLM` and `AsyncLLM`.

    Raises:
        InvalidConfig: there is no such thing yet.
    """
    if args.pipeline_parallel_size != 1:
        raise InvalidConfig(f"pipeline_parallel_size={args.pipeline_parallel_size}: pipeline parallelism is not there")
    return {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
