"""Pipelines in programs of their own, for tests that kill them.

python ray_data_program.py ADDRESS
"""

from __future__ import annotations

import sys
import time
from typing import Any

import ray

from raycore.data import ProcessorConfig, build_processor
from raycore.demo import demo_model_path

LIMITS: dict[str, Any] = {"num_threads": 1, "dtype": "float32", "max_model_len": 128, "standby_delay_s": None}


def demo_rows(count: int) -> list[dict[str, Any]]:
    """Sums that the bundled model knows."""
    return [{"id": index, "prompt": f"{10 + index % 89} + 58 ="} for index in range(count)]


def answer(index: int) -> str:
    """What it says."""
    return f" {68 + index % 89}"


def with_params(row: dict[str, Any]) -> dict[str, Any]:
    return {"sampling_params": {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True}}


def forever(address: str) -> None:
    ray.init(address=address, log_to_driver=False)
    chosen = ProcessorConfig(model_source=demo_model_path(), concurrency=2, batch_size=10, engine_kwargs=LIMITS)
    rows = build_processor(chosen, with_params)(ray.data.from_items(demo_rows(100_000))).iter_rows()
    next(iter(rows))
    print("first row", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    forever(sys.argv[1])
