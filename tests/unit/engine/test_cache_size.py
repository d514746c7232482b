"""A KV cache is as large as the memory of every worker allows, and no larger than useful."""

import msgspec
import pytest
from configs import make_config
from fake_executor import FakeExecutor
from msgspec.structs import replace

from raycore.cache_layout import KVCacheConfig, LayerCacheSpec, WorkerCacheSpec
from raycore.config import EngineConfig
from raycore.engine.cache_size import choose_cache, describe_cache, get_kv_cache_config
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


def test_automatic_lengths_are_the_longest_that_memory_holds(caplog):
    config = make_config(max_model_len=64)
    config = msgspec.structs.replace(
        config, scheduler=msgspec.structs.replace(config.scheduler, fits_max_model_len=True)
    )
    # blocks of 16 tokens; the second worker has 1024 bytes a block
    for num_bytes, length in ((8 * 1024, 64), (4 * 1024, 64), (3 * 1024, 48), (1024, 16)):
        caplog.clear()
        cache = choose_cache(config, FakeExecutor(num_bytes))
        assert cache.layout.limits.max_model_len == length
        assert cache.num_blocks >= cache.layout.num_blocks_for(length)
        assert ("max_model_len is" in caplog.text) == (length < 64)
    assert choose_cache(config, FakeExecutor(), num_blocks=2).layout.limits.max_model_len == 32
    with pytest.raises(InvalidConfig, match="less than max_model_len=1"):
        choose_cache(config, FakeExecutor(100))


def hybrid(window: int = 32) -> tuple[EngineConfig, list[WorkerCacheSpec]]:
    """Two stages of six layers, of which two keep all tokens, and the second stage has heads twice as large."""
    small, large = (
        [LayerCacheSpec("window", size, window), LayerCacheSpec("full", size), LayerCacheSpec("window", size, window)]
        for size in (1000, 2000)
    )
    workers = [WorkerCacheSpec(tuple(small), 0), WorkerCacheSpec(tuple(large), 3)]
    return make_config(max_model_len=512, max_num_batched_tokens=64, max_num_seqs=4), workers


def test_all_workers_get_as_many_blocks_as_fit_on_each_of_them():
    config, workers = hybrid()
    cache = get_kv_cache_config(config, workers, [200_000, 300_000], None)
    assert [(group.kind, group.layers) for group in cache.layout.groups] == [
        ("full", (1, 4)),
        ("window", (0, 3)),
        ("window", (2, 5)),
    ]
    assert [cache.layout.block_bytes(worker) for worker in workers] == [1000, 2000]
    assert cache.num_blocks == 150
    assert get_kv_cache_config(config, workers, None, 7) == KVCacheConfig(7, cache.layout)


def test_states_move_in_as_many_parts_as_the_worker_with_the_largest_ones_needs():
    config, (small, large) = hybrid()
    workers = [replace(small, state_bytes=1001), replace(large, state_bytes=6000)]
    assert get_kv_cache_config(config, workers, None, 7).num_state_parts == 3
    assert get_kv_cache_config(config, workers, [200_000, 300_000], None).num_state_parts == 3
    assert get_kv_cache_config(config, [small, large], None, 7).num_state_parts == 0


def test_a_cache_of_groups_holds_a_request_with_its_windows_and_a_step():
    config, workers = hybrid()
    needed = 32 + 2 * ((32 + 64 - 2 + 15) // 16 + 1)
    assert get_kv_cache_config(config, workers, [needed * 1000, needed * 2000], None).num_blocks == needed
    with pytest.raises(InvalidConfig, match=rf"{needed - 1} blocks .*\({needed} blocks\).*max_num_batched_tokens"):
        get_kv_cache_config(config, workers, [needed * 1000, needed * 2000 - 1], None)


def test_the_log_says_what_each_group_has():
    config, workers = hybrid()
    text = describe_cache(get_kv_cache_config(config, workers, None, 100), workers)
    first, *groups = text.split("\n")
    assert "holds 1347 tokens (100 blocks of 16, 2000 bytes each)" in first
    assert "max_model_len=512" in first
    assert [line.split(":")[0].strip() for line in groups] == ["full", "window", "window"]
    assert "a window of 32 tokens, at most 7 blocks of a request, 2 layers (0, 3)" in groups[1]
    assert describe_cache(choose_cache(make_config(num_gpu_blocks_override=7), FakeExecutor()), []).endswith("each)")
