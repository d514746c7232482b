"""How layers are divided into groups, and what requests take of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from raycore.cache_layout import (
    MAX_GROUPS,
    CacheLayout,
    CacheLimits,
    CachePage,
    LayerCacheSpec,
    WorkerCacheSpec,
    divide_layers,
    first_seen_block,
    max_seen_blocks,
    model_layers,
)

SIZE = 1000


def layers_of(kinds: str, window: int = 1024) -> list[LayerCacheSpec]:
    """F: keeps all tokens, L: compressed, W: the last ones, N: nothing."""
    specs = {
        "F": LayerCacheSpec("full", SIZE),
        "L": LayerCacheSpec("latent", SIZE // 10),
        "W": LayerCacheSpec("window", SIZE, window),
        "N": LayerCacheSpec("none", 0),
    }
    return [specs[kind] for kind in kinds]


def layout_of(kinds: str, window: int = 1024, max_model_len: int = 32768, **limits: Any) -> CacheLayout:
    return divide_layers(layers_of(kinds, window), CacheLimits(16, max_model_len, 2048, **limits))


def shape(layout: CacheLayout) -> list[tuple[str, int]]:
    return [(group.kind, len(group.layers)) for group in layout.groups]


GEMMA3 = {"1B": (26, 512), "4B": (34, 1024), "12B": (48, 1024), "27B": (62, 1024)}


@pytest.mark.parametrize(
    ("kinds", "window", "groups"),
    [
        (("WWWWWF" * 11)[:26], 512, [("full", 4), *[("window", 4)] * 4, *[("window", 3)] * 2]),
        (("WWWWWF" * 11)[:34], 1024, [("full", 5), *[("window", 5)] * 5, ("window", 4)]),
        (("WWWWWF" * 11)[:48], 1024, [("full", 8), *[("window", 8)] * 5]),
        (("WWWWWF" * 11)[:62], 1024, [("full", 10), *[("window", 9)] * 4, *[("window", 8)] * 2]),
        ("WF" * 12, 128, [("full", 12), ("window", 12)]),
        ("WF" * 18, 128, [("full", 18), ("window", 18)]),
        ("F" * 32, 0, [("full", 32)]),
        ("W" * 32, 4096, [("window", 32)]),
        ("L" * 61, 0, [("latent", 61)]),
        ("NNNF" * 12, 0, [("full", 12)]),
        ("N" * 24, 0, [("full", 0)]),
    ],
    ids=[
        *("gemma3-1b", "gemma3-4b", "gemma3-12b", "gemma3-27b", "gpt-oss-20b", "gpt-oss-120b"),
        *("llama", "mistral", "deepseek", "three of four keep a state", "all keep a state"),
    ],
)
def test_layers_of_one_kind_are_divided_into_groups(kinds: str, window: int, groups: list[tuple[str, int]]) -> None:
    layout = layout_of(kinds, window)
    assert shape(layout) == groups
    divided = sorted(layer for group in layout.groups for layer in group.layers)
    assert divided == [layer for layer, kind in enumerate(kinds) if kind != "N"]
    letters = {"full": "F", "window": "W", "latent": "L"}
    assert all({kinds[layer] for layer in group.layers} <= {letters[group.kind]} for group in layout.groups)


@pytest.mark.parametrize(
    ("limits", "groups"),
    [
        ({"max_model_len": 512}, [("full", 12)]),
        ({"frees_windows": False}, [("full", 12)]),
        ({"first_keeps_all": True}, [("full", 2), *[("window", 2)] * 5]),
        ({}, [("full", 2), *[("window", 2)] * 5]),
        ({"max_model_len": 520}, [("full", 12)]),
    ],
    ids=["a window of all", "switched off", "drafts", "plain", "rounding would take more than windows save"],
)
def test_windows_that_save_nothing_are_no_windows(limits: dict[str, Any], groups: list[tuple[str, int]]) -> None:
    layout = layout_of("WWWWWF" * 2, 512, **limits)
    assert shape(layout) == groups
    assert layout.groups[0].window is None


def test_what_drafts_needs_a_group_that_keeps_all_tokens() -> None:
    assert layout_of("WWWW").windows == [1024]
    assert layout_of("WWWW", first_keeps_all=True).windows == [None]
    assert shape(layout_of("WWLW", first_keeps_all=True))[0] == ("latent", 1)


def test_there_are_never_more_groups_than_the_maximum() -> None:
    for num_windows in (1, 7, 8, 40):
        assert len(layout_of("F" + "W" * num_windows).groups) <= MAX_GROUPS


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize("chunk", [1, 2, 8, 21])
def test_the_maximum_of_blocks_that_a_chunk_sees_is_that_of_all_places(window: int, chunk: int) -> None:
    counts = [(start + chunk - 1) // 8 - first_seen_block(window, start, 8) + 1 for start in range(200)]
    assert max(counts) == max_seen_blocks(window, chunk, 8)


@pytest.mark.parametrize("window", [1, 5, 16])
def test_the_first_block_seen_is_that_of_the_first_token_seen(window: int) -> None:
    for num_computed in range(60):
        first_token = next(key for key in range(num_computed + 1) if key > num_computed - window)
        assert first_seen_block(window, num_computed, 8) == first_token // 8


def test_a_request_holds_at_most_its_windows_and_the_tokens_of_a_step() -> None:
    layout = layout_of("WF" * 4, 128)
    assert layout.blocks_of(32768) == [2048, (128 + 2048 - 2 + 15) // 16 + 1]
    assert layout.blocks_of(32768, chunk=1) == [2048, 9]
    assert layout.blocks_of(50) == [4, 4]
    assert layout.num_blocks_for(50) == 8
    assert layout.num_tokens_in(2 * (2048 + 9)) == 2 * 32768
    assert layout_of("FF").num_tokens_in(10) == 160


def test_stages_have_about_as_many_layers_of_each_group() -> None:
    layout = layout_of(("WWWWWF" * 6)[:34])
    for stage in (range(17), range(17, 34), range(5), range(33, 34)):
        groups = layout.stage_layers(stage)
        assert sorted(layer for group in groups for layer in group) == list(range(len(stage)))
        counts = [len(group) for group in groups[1:]]
        assert max(counts) - min(counts) <= 1
    worker = WorkerCacheSpec(tuple(layers_of(("WWWWWF" * 6)[17:34])), 17, draft_bytes=7)
    assert layout.block_bytes(worker) == 3 * SIZE + 7


def test_a_page_holds_the_largest_layer_that_uses_it() -> None:
    layout = layout_of("WLWL")
    assert [group.layers for group in layout.groups] == [(1, 3), (0, 2)]
    assert layout.block_bytes(WorkerCacheSpec(tuple(layers_of("WLWL")))) == 2 * SIZE


def with_bytes(layers: list[LayerCacheSpec], *sizes: int) -> list[LayerCacheSpec]:
    return [msgspec.structs.replace(each, block_bytes=size) for each, size in zip(layers, sizes, strict=True)]


def test_a_layer_that_does_not_divide_a_page_has_its_own() -> None:
    layers = with_bytes(layers_of("WFWFW"), SIZE, SIZE, SIZE, SIZE, 7)
    layout = divide_layers(layers, CacheLimits(16, 32768, 2048))
    assert [group.layers for group in layout.groups] == [(1, 3), (0, 2, 4)]
    first, second, own = CachePage(SIZE, 0), CachePage(SIZE, 1), CachePage(7, 0)
    assert layout.pages(WorkerCacheSpec(tuple(layers))) == {0: first, 1: first, 2: second, 3: second, 4: own}
    # on a stage, layer 4 is beside layer 3
    stage = WorkerCacheSpec(tuple(layers[3:]), 3, draft_bytes=5)
    assert layout.pages(stage) == {0: CachePage(SIZE, 0), 1: own}
    assert layout.block_bytes(stage) == SIZE + 7 + 5


def test_large_layers_of_all_groups_share_pages() -> None:
    # the second layer of group 0 is the largest one
    layers = with_bytes(layers_of("FWFW"), SIZE, 2 * SIZE, 2 * SIZE, SIZE)
    layout = divide_layers(layers, CacheLimits(16, 32768, 2048))
    assert [group.layers for group in layout.groups] == [(0, 2), (1, 3)]
    small, large = CachePage(SIZE, 0), CachePage(2 * SIZE, 0)
    assert layout.pages(WorkerCacheSpec(tuple(layers))) == {0: small, 1: large, 2: large, 3: small}


def test_groups_of_layers_whose_windows_keep_more_save_memory() -> None:
    """MiMo-V2-Flash: layers with windows have twice as many key-value heads."""
    layers = layers_of("FWWWW" + "FWWWWW" * 7 + "F", window=129)
    layers = [msgspec.structs.replace(each, block_bytes=(2 if each.window else 1) * SIZE) for each in layers]
    layout = divide_layers(layers, CacheLimits(16, 32768, 2048))
    assert shape(layout) == [("full", 9), *[("window", 8)] * 4, ("window", 7)]
    assert layout.block_bytes(WorkerCacheSpec(tuple(layers))) == (8 * 2 + 1) * SIZE


def test_the_models_layers_are_those_of_all_stages_and_the_largest_of_all_workers() -> None:
    small, large = LayerCacheSpec("full", 1), LayerCacheSpec("full", 2)
    workers = [WorkerCacheSpec((small,), 1), WorkerCacheSpec((small,), 0), WorkerCacheSpec((large,), 0)]
    assert model_layers(workers) == [large, small]


def test_what_layers_keep_beside_is_in_pages_behind_all_others() -> None:
    small, large = SIZE // 20, SIZE // 10
    layers = [
        msgspec.structs.replace(each, beside_bytes=size)
        for each, size in zip(layers_of("LLL"), (small, 0, large), strict=True)
    ]
    layout = divide_layers(layers, CacheLimits(16, 32768, 2048))
    worker = WorkerCacheSpec(tuple(layers), draft_bytes=5)
    assert layout.pages(worker) == {layer: CachePage(large, layer) for layer in range(3)}
    assert layout.pages_beside(worker) == {0: CachePage(small, 0), 2: CachePage(large, 3)}
    assert layout.block_bytes(worker) == 3 * large + small + large + 5
