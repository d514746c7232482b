"""Pipelines in programs of their own, for tests that kill them.

python ray_data_program.py forever ADDRESS
python ray_data_program.py files DIRECTORY
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

from raycore.data import ProcessorConfig, build_processor
from raycore.demo import demo_model_path

LIMITS: dict[str, Any] = {"num_threads": 1, "dtype": "float32", "max_model_len": 128, "standby_delay_s": None}
NUM_ROWS, NUM_FILES = 96, 12
FAST_TOKENS = 30
SLOW_FILES, SLOW_TOKENS = range(8, NUM_FILES), 900
"""Whose rows keep the first run from ending before it is killed, and how many tokens these get."""


def demo_rows(count: int) -> list[dict[str, Any]]:
    """Sums that the bundled model knows."""
    return [{"id": index, "prompt": f"{10 + index % 89} + 58 ="} for index in range(count)]


def answer(index: int) -> str:
    """What it says."""
    return f" {68 + index % 89}"


def with_params(row: dict[str, Any], num_tokens: int = FAST_TOKENS) -> dict[str, Any]:
    return {"sampling_params": {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}}


def with_slow_end(row: dict[str, Any]) -> dict[str, Any]:
    return with_params(row, SLOW_TOKENS if row["id"] % NUM_FILES in SLOW_FILES else FAST_TOKENS)


def forever(address: str) -> None:
    ray.init(address=address, log_to_driver=False)
    # each process that runs tasks imports Ray Data first
    ray.data.DataContext.get_current().execution_options.resource_limits = ray.data.ExecutionResources.for_limits(cpu=4)
    chosen = ProcessorConfig(model_source=demo_model_path(), concurrency=2, batch_size=10, engine_kwargs=LIMITS)
    processed = build_processor(chosen, with_params)(ray.data.from_items(demo_rows(100_000)))
    rows = iter(processed.iter_rows())  # kept: an iterator that nobody holds ends the pipeline
    next(rows)
    print("first row", flush=True)
    time.sleep(600)


def files(directory: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from ray.data.checkpoint import CheckpointConfig

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    given, written = directory / "given", directory / "written"
    is_first = not given.exists()
    if is_first:
        given.mkdir()
        rows = demo_rows(NUM_ROWS)
        for number in range(NUM_FILES):
            pq.write_table(pa.Table.from_pylist(rows[number::NUM_FILES]), given / f"{number:02}.parquet")
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(directory / "checkpoint"), delete_checkpoint_on_success=False
    )
    num_before = count_rows(written)
    chosen = ProcessorConfig(
        model_source=demo_model_path(),
        concurrency=2,
        batch_size=8,
        max_concurrent_batches=1,
        engine_kwargs=LIMITS | {"max_model_len": SLOW_TOKENS + 100},
    )
    processor = build_processor(
        chosen, with_slow_end if is_first else with_params, lambda row: {"id": row["id"], "text": row["generated_text"]}
    )
    if is_first:
        threading.Thread(target=tell_when_written, args=(written,), daemon=True).start()
    processor(ray.data.read_parquet(str(given), override_num_blocks=NUM_FILES)).write_parquet(str(written))
    found = pq.read_table(written).to_pylist()
    assert sorted(row["id"] for row in found) == list(range(NUM_ROWS)), len(found)
    assert all(row["text"].startswith(answer(row["id"])) for row in found)
    assert 0 < num_before < NUM_ROWS, num_before
    print("each row is there once, and fewer were computed", flush=True)


def count_rows(directory: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(file).num_rows for file in directory.glob("*.parquet"))


def tell_when_written(directory: Path) -> None:
    while len(list(directory.glob("*.parquet"))) < 2:
        time.sleep(0.05)
    print("some are written", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "forever":
        forever(sys.argv[2])
    else:
        files(Path(sys.argv[2]))
