"""Several steps in flight change no output: whatever requests ask for, and whoever is aborted or preempted."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from mixed_requests import run
from number_formats import REPEATABLE


@pytest.mark.parametrize("number_format", REPEATABLE)
@pytest.mark.parametrize("blocks", [200, 12], ids=["enough blocks", "preemptions"])
def test_outputs_with_several_steps_in_flight_equal_those_of_one_step_at_a_time(
    blocks: int, number_format: dict[str, Any]
) -> None:
    limits = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "num_gpu_blocks_override": blocks, "block_size": 8}
    options = limits | number_format
    aborted_at = {3: 5, 11: 1, 17: 9, 24: 2}
    expected, _ = run({}, max_concurrent_batches=1, **options)
    for num_in_flight in (2, 3):
        found, load = run(aborted_at, max_concurrent_batches=num_in_flight, **options)
        check(found, load.num_preemptions, deepcopy(expected), aborted_at, blocks, num_in_flight)


def check(
    found: dict[int, Any],
    num_preemptions: int,
    expected: dict[int, Any],
    aborted_at: dict[int, int],
    blocks: int,
    num_in_flight: int,
) -> None:
    assert (num_preemptions > 0) == (blocks < 200)
    for seq_id, output in found.items():
        if output["end"] is None:
            assert len(output["tokens"]) in range(aborted_at[seq_id], aborted_at[seq_id] + num_in_flight)
            assert output["tokens"] == expected[seq_id]["tokens"][: len(output["tokens"])]
        else:
            assert output.pop("values") == pytest.approx(expected[seq_id].pop("values"), abs=1e-3)
            assert output == expected[seq_id]
    assert sum(output["end"] is None for output in found.values()) >= 2
    assert {output["end"][0] for output in expected.values()} == {"stop", "length"}
