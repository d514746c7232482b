"""Breaks ranks at random while requests run, and reports lost requests, changed results, and recovery times.

Mixed requests (greedy and seeded, streaming and not, some with log probabilities, stop strings or n=2) run once
undisturbed, and once while engines and workers are killed (SIGKILL), stopped (SIGSTOP) or made to raise, and whole
nodes are removed. Every request has to finish with the result of the undisturbed run. The cluster has several nodes on
this machine: a head for this program, and a few more nodes than ranks.

    python -m tests.chaos.failures                          500 requests at DP 2, then at DP 3
    python -m tests.chaos.failures --one-node               only kill processes, all on one node
    python -m tests.chaos.failures --no-batch-invariant     results may differ by rounding
    python -m tests.chaos.failures --stages 2               ranks with two pipeline stages, each of which breaks
    python -m tests.chaos.failures --pauses                 faults in pauses, which come again and again, in all modes
    python -m tests.chaos.failures --sleep                  faults while the engine falls asleep, sleeps and wakes up
    python -m tests.chaos.failures --adapters 4             requests use 4 LoRA adapters, and none
    python -m tests.chaos.failures --kv-connector peers     ranks read prefixes; or: disaggregation, offload
    python -m tests.chaos.failures --family gemma3          a small random model of this family, not the bundled one
    python -m tests.chaos.failures --images qwen2_5_vl      prompts with images; or: qwen3_vl, gemma3
    python -m tests.chaos.failures --images qwen2_5_vl --ec-connector    the same, and their embeddings are in files
    python -m tests.chaos.failures --pooling                embeddings of texts and of tokens, instead of outputs

With a KV connector, prompts begin with long texts that several of them share, the cache is too small for all, and
transfers are corrupted, late and lost at random. With --ec-connector, so are files of embeddings.

In pauses that abort requests, these are submitted again. Faults then strike only while the engine is being paused, is
paused, or is being resumed, and `--min-faults` counts these.

Every other adapter is added before the faults begin, and the others come with requests only. One more, that no request
uses, is added and removed all the time. Ranks have one slot less than there are adapters, so some are read again.

Without batch invariance, the last bits of a token's logits depend on what else is in its step, so a different token may
win where the best two are nearly tied. If a greedy result has a different token, the undisturbed run's logits of the
two tokens are compared. Sampled results that differ are only counted, because they also depend on random noise.

The exit status is 1 if a request was lost, a result differs by more than rounding allows, a token came in a pause, a
rank stays broken, or anything is left behind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from adapters import write_adapters
from common import table
from families import FAMILIES, make_checkpoint

from chaos.clusters import Cluster, Nodes
from chaos.connectors import CONNECTORS, PREFIXES, embedding_options, options_of
from chaos.faults import REMOVE_NODE, Fault, is_told_at_once, process_kinds
from chaos.interruptions import PAUSES, SLEEPS
from chaos.report import both, counted, disturbance_rows, print_lost
from chaos.run import DisturbedRun, add_options, pace_of, start_engine
from chaos.workload import make_image_requests, make_pooled_requests, make_requests
from raycore import LoRARequest
from raycore.demo import demo_model_path

_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PLACEHOLDERS = {"qwen2_5_vl": _QWEN_IMAGE, "qwen3_vl": _QWEN_IMAGE, "gemma3": "<start_of_image>"}
"""What stands for an image in a text, by kind of model."""


def run(dp: int, args: argparse.Namespace) -> bool:
    """One run. Returns whether nothing was lost, changed or left."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        if args.family is not None:
            args.model = str(random_model(args.family, Path(directory)))
        if args.images is not None:
            args.model = str(vision_model(args.images, Path(directory)))
        count = args.adapters and args.adapters + 1
        return run_with(write_adapters(args.model, Path(directory), count, rank=8), dp, args)


def random_model(family: str, directory: Path) -> Path:
    """Write a checkpoint of the family that has the bundled model's tokenizer."""
    bundled = Path(demo_model_path())
    config = json.loads((bundled / "config.json").read_text())
    sizes = {name: config[name] for name in ("vocab_size", "eos_token_id", "bos_token_id")}
    path = make_checkpoint(family, directory, max_position_embeddings=1024, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled / name, path / name)
    return path


def vision_model(kind: str, directory: Path) -> Path:
    """Write a small random checkpoint that sees images, as tests do."""
    from vision_checkpoints import make_vision_checkpoint  # imported lazily: it imports transformers

    return make_vision_checkpoint(kind, directory)


def run_with(adapters: Sequence[LoRARequest], dp: int, args: argparse.Namespace) -> bool:
    """The same. `adapters`: those that requests use, and one more; or none."""
    kinds = process_kinds(args.stages)
    if args.one_node:
        cluster, kinds = Cluster(dp, args.stages), [kind for kind in kinds if is_told_at_once(kind)]
    else:
        cluster, kinds = Nodes(dp, args.stages, args.spare_nodes), [*kinds, REMOVE_NODE]
    options: dict[str, Any] = {"batch_invariant": True} if args.batch_invariant else {}
    if args.adapters:
        options |= {"enable_lora": True, "max_loras": args.adapters, "max_cpu_loras": args.adapters}
    if args.pooling:
        options["runner"] = "pooling"
    if args.speculation is not None:
        options["speculative_config"] = args.speculation
    if args.kv_connector is not None:
        options |= options_of(args.kv_connector)
    if args.ec_connector:
        options |= embedding_options()
    started_s = time.monotonic()
    llm = start_engine(args, dp, pipeline_parallel_size=args.stages, **options)
    cold_start_s = time.monotonic() - started_s
    if args.images is not None:
        requests = make_image_requests(args.requests, args.seed, PLACEHOLDERS[args.images])
    elif args.pooling:
        requests = make_pooled_requests(args.requests, args.seed, adapters[:-1])
    else:
        requests = make_requests(
            args.requests,
            args.seed,
            all_logprobs=not args.batch_invariant,
            adapters=adapters[:-1],
            num_prefixes=PREFIXES * (args.kv_connector is not None),
        )
    interruptions = PAUSES * args.pauses + SLEEPS * args.sleep
    pace = pace_of(args, interruptions)
    disturbed = DisturbedRun(llm, cluster, kinds, pace, requests, args.concurrency, args.seed, adapters)
    disturbed.run(lambda run: bool(run.comparison.num_results) and len(run.observer.faults) >= args.min_faults)
    rows = [["", f"DP {dp}"], *disturbance_rows(disturbed)]
    if not interruptions:
        rows += recovery_rows(disturbed, cold_start_s)
    if args.kv_connector is not None or args.ec_connector:
        rows.append(["transfers of the workers that lived", counted(disturbed.transfers.elements())])
    print(table([*rows, ["left behind", ", ".join(disturbed.left) or "nothing"]]), flush=True)
    print_lost(disturbed)
    return disturbed.is_good()


def recovery_rows(run: DisturbedRun, cold_start_s: float) -> list[list[object]]:
    """How fast ranks recovered. In pauses this would say little: stopped ranks aren't noticed, and streams wait."""
    faults, streams = run.observer.faults, run.observer.streams
    killed = [fault for fault in faults if is_told_at_once(fault.kind)]
    gaps = [b - a for stream in streams.values() for a, b in itertools.pairwise(stream.times_s)]

    def stalls(faults: Iterable[Fault]) -> list[float]:
        return [stall_s for fault in faults for stall_s in fault.stalls_s(streams)]

    def serving(faults: Iterable[Fault]) -> list[float]:
        return [fault.serving_s - fault.injected_s for fault in faults if fault.serving_s]

    detections_ms = [1000 * (fault.detected_s - fault.injected_s) for fault in killed if fault.detected_s]
    return [
        ["longest pause of a stream, s", f"{max(gaps, default=0):.2f}"],
        ["pause of streams on a killed rank, s: p50, p99", both(stalls(killed))],
        ["pause of streams on any broken rank, s: p50, p99", both(stalls(faults))],
        ["killed process to detection, ms: p50, p99", both(detections_ms, 1)],
        ["fault to the rank serving again, s: p50, p99", both(serving(faults))],
        ["the same, killed processes only", both(serving(killed))],
        ["cold start of all ranks, s", f"{cold_start_s:.2f}"],
    ]


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--stages", type=int, default=1, help="number of pipeline stages of a rank")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--min-faults", type=int, default=0, help="repeat requests until this many faults occurred")
    parser.add_argument("--spare-nodes", type=int, default=3, help="nodes in addition to one per rank")
    parser.add_argument("--one-node", action="store_true")
    parser.add_argument("--pauses", action="store_true", help="pause the engine again and again")
    parser.add_argument("--sleep", action="store_true", help="put the engine to sleep again and again")
    parser.add_argument("--adapters", type=int, default=0, help="number of LoRA adapters that requests use")
    parser.add_argument("--family", choices=sorted(FAMILIES), help="of a small random model")
    parser.add_argument("--images", choices=sorted(PLACEHOLDERS), help="a small random model that sees images")
    parser.add_argument("--kv-connector", choices=sorted(CONNECTORS), help="with faults in its transfers")
    parser.add_argument("--ec-connector", action="store_true", help="with --images: embeddings in faulty files")
    parser.add_argument("--speculation", type=json.loads, metavar="JSON", help="the engine's speculative_config")
    parser.add_argument("--pooling", action="store_true", help="requests get embeddings instead of tokens")
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    if args.ec_connector and args.images is None:
        parser.error("--ec-connector needs --images")
    if args.pooling and not args.batch_invariant:
        parser.error("--pooling compares all bits, so it needs --batch-invariant")
    logging.basicConfig(level=logging.CRITICAL)
    os.environ.setdefault("RAY_worker_niceness", "0")
    is_good = [run(dp, args) for dp in args.dp]
    sys.exit(not all(is_good))


if __name__ == "__main__":
    main()
