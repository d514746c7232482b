"""A KV cache is as large as the memory of every worker allows, and no larger than useful."""

import pytest
from configs import make_config
from test_core import FakeExecutor

from raycore.engine.cache_size import choose_cache
from raycore.errors import InvalidConfig


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_num_seqs": 64, "max_model_len": 64}, 100),
        ({"max_num_seqs": 2, "max_model_len": 64}, 2 * 64 // 16),
        ({"max_num_seqs": 1, "max_model_len": 65}, 5),
        ({"num_gpu_blocks_override": 7}, 7),
    ],
    ids=["the second worker has least", "more would be useless", "a block that is not full", "given"],
)
def test_the_number_of_blocks_is_what_every_worker_holds_and_requests_can_use(options, expected):
    # 2^30 bytes at 2048 a block, 100 KiB at 1024, 100 KiB at 512
    assert choose_cache(make_config(**options), FakeExecutor(100 * 1024)).num_blocks == expected


def test_memory_that_holds_no_request_is_refused_with_the_numbers():
    with pytest.raises(InvalidConfig, match=r"16 tokens \(0.0 MiB at 64 bytes a token\).*max_model_len=64"):
        choose_cache(make_config(max_model_len=64), FakeExecutor(1024))
