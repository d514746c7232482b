"""Changes the number of ranks that share experts while streams run: by moving experts, and by restarting all ranks.

A random mixture-of-experts model is written to a temporary directory. Each of `--streams` callers sends one request
after the other, always with the same prompt, and has to get the tokens that this prompt gets while nothing changes. The
engine computes in float32 with batch_invariant=True, so any difference is an error. Inotify counts how often a process
opens a file with weights. The pause of a change is the longest time between two outputs of any stream that overlaps the
change. Requests of a rank that leaves move to others at once (drain_timeout_s=0).

    python benchmarks/elastic.py                     2 -> 3 -> 2 -> 1 ranks, 64 streams
    python benchmarks/elastic.py --ranks 1 2 4 1     other numbers of ranks

The exit status is 1 if a request was lost, tokens differ, or experts were moved and a file was opened.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import let_processes_import, table
from file_opens import FileOpens
from safetensors.torch import save_file

from raycore import AsyncLLM, SamplingParams
from raycore.demo import demo_model_path, held_out_problems

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "batch_invariant": True,
    "enable_expert_parallel": True,
    "num_threads": 1,
    "max_model_len": 512,
    "max_num_seqs": 64,
    "num_gpu_blocks_override": 2048,
    "use_tqdm_on_load": False,
}


@dataclass
class Change:
    """A change of the number of ranks."""

    name: str
    started_s: float
    ended_s: float
    num_opens: int


@dataclass
class Load:
    """Callers that send one request after the other, until `is_over`."""

    llm: AsyncLLM
    prompts: list[str]
    params: SamplingParams
    expected: list[list[int]] = field(default_factory=list[list[int]])
    is_over: bool = False
    num_requests: int = 0
    num_different: int = 0
    lost: list[Exception] = field(default_factory=list[Exception])
    gaps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """The times of two outputs of a stream, one after the other."""

    async def call(self, caller: int) -> None:
        """Send requests."""
        while not self.is_over:
            self.num_requests += 1
            try:
                token_ids = await self.stream(caller)
                self.num_different += token_ids != self.expected[caller]
            except Exception as error:  # the report counts whatever goes wrong
                self.lost.append(error)

    async def stream(self, caller: int) -> list[int]:
        """Send a request, and return its tokens."""
        token_ids: list[int] = []
        before_s: float | None = None
        async for output in self.llm.generate(self.prompts[caller], self.params):
            now_s = time.monotonic()
            if before_s is not None:
                self.gaps.append((before_s, now_s))
            before_s, token_ids = now_s, output.outputs[0].token_ids
        return token_ids

    def longest_gap_s(self, start_s: float, end_s: float) -> float:
        """The longest time between two outputs of a stream that overlaps a period."""
        return max((end - start for start, end in self.gaps if end > start_s and start < end_s), default=0.0)


def write_model(args: argparse.Namespace, path: Path) -> int:
    """Write a random Qwen3-MoE checkpoint with the bundled model's tokenizer. Returns the size of its weights."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo_model_path(), name), path / name)
    vocab_size = json.loads(Path(demo_model_path(), "config.json").read_text())["vocab_size"]
    hidden, heads, head_dim = args.hidden, args.hidden // 32, 32
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": args.expert_size,
        "moe_intermediate_size": args.expert_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "num_experts": args.experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": None,
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(args.layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (heads * head_dim, hidden) for name in "qkvo"}
        shapes[f"{prefix}.mlp.gate.weight"] = (args.experts, hidden)
        for expert in range(args.experts):
            own = f"{prefix}.mlp.experts.{expert}"
            shapes |= {f"{own}.{name}_proj.weight": (args.expert_size, hidden) for name in ("gate", "up")}
            shapes[f"{own}.down_proj.weight"] = (hidden, args.expert_size)
    torch.manual_seed(args.seed)
    # wide, so that a random model's tokens depend on its input
    tensors = {name: torch.randn(shape) * 0.1 + ("norm" in name) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


async def run(args: argparse.Namespace, path: Path, options: dict[str, Any]) -> tuple[Load, list[Change], int, float]:
    """Make all changes. Returns the load, the changes, the opens at the start, and the gap while nothing changes."""
    opens = FileOpens(path.glob("*.safetensors"))
    prompts = [prompt for prompt, _ in held_out_problems(3, args.streams)]
    params = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True)
    changes: list[Change] = []
    async with await AsyncLLM.create(str(path), data_parallel_size=args.ranks[0], **OPTIONS, **options) as llm:
        num_opens = num_opens_at_start = opens.count()
        load = Load(llm, prompts, params)
        load.expected = list(await asyncio.gather(*map(load.stream, range(args.streams))))
        load.gaps.clear()
        callers = [asyncio.create_task(load.call(caller)) for caller in range(args.streams)]
        started_s = time.monotonic()
        await asyncio.sleep(args.seconds)
        usual_s = load.longest_gap_s(started_s, time.monotonic())
        for before, after in pairwise(args.ranks):
            started_s = time.monotonic()
            await llm.scale(after, drain_timeout_s=0.0)
            ended_s = time.monotonic()
            await asyncio.sleep(args.seconds)
            num_before, num_opens = num_opens, opens.count()
            changes.append(Change(f"{before} -> {after}", started_s, ended_s, num_opens - num_before))
        load.is_over = True
        await asyncio.gather(*callers)
    opens.close()
    return load, changes, num_opens_at_start, usual_s


def report(name: str, load: Load, changes: list[Change], num_opens_at_start: int, usual_s: float) -> None:
    """Print what happened."""
    print(f"\n{name}: {load.num_requests} requests, {len(load.lost)} lost, {load.num_different} with other tokens")
    tokens = {token for token_ids in load.expected for token in token_ids}
    print(f"the {len(load.expected)} prompts get {len({*map(tuple, load.expected)})} outputs of {len(tokens)} tokens")
    print(f"opens of files with weights at the start: {num_opens_at_start}")
    rows: list[list[object]] = [["ranks", "scale(), s", "longest pause of a stream, ms", "opens, at least"]]
    rows.append(["no change", "", f"{usual_s * 1e3:.0f}", ""])
    for change in changes:
        pause_s = load.longest_gap_s(change.started_s, change.ended_s)
        rows.append([change.name, f"{change.ended_s - change.started_s:.2f}", f"{pause_s * 1e3:.0f}", change.num_opens])
    print(table(rows), flush=True)
    for error in load.lost[:3]:
        print(f"lost: {type(error).__name__}: {error}")


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 2, 1], help="numbers of ranks")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new", type=int, default=100, help="tokens of a request")
    parser.add_argument("--seconds", type=float, default=5.0, help="before, between and after changes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=12)
    parser.add_argument("--expert-size", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    let_processes_import(Path(__file__).parent)  # workers need `restarting_worker`
    is_good = True
    with tempfile.TemporaryDirectory() as directory:
        num_bytes = write_model(args, Path(directory))
        print(f"{num_bytes / 2**20:.0f} MiB of weights, float32, batch_invariant=True, {args.streams} streams")
        ways = {"moving experts": {}, "restarting": {"worker_cls": "restarting_worker.RestartingWorker"}}
        for name, options in ways.items():
            load, changes, *rest = asyncio.run(run(args, Path(directory), options))
            report(name, load, changes, *rest)
            is_good &= not (load.lost or load.num_different)
            is_good &= bool(options) or not any(change.num_opens for change in changes)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
