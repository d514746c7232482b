"""Engines that share the embeddings of images: an image is encoded once, and gives the same tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from vision_checkpoints import IMAGE, KINDS, Prompt, Prompts, image, make_vision_checkpoint

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


def make_core(path: Path, **options: Any) -> EngineCore:
    config = resolve(path, dtype="float32", num_threads=1, max_num_seqs=4, max_num_batched_tokens=64, **options)
    return EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))


def generate(path: Path, prompts: list[Prompt], **options: Any) -> tuple[list[list[int]], Any]:
    """Returns each prompt's tokens, and the counts of what was loaded and saved."""
    core = make_core(path, **options)
    outputs = run(core, prompts)
    (counts,) = core.executor.collective_rpc(counts_of)
    core.shutdown()
    return outputs, counts


def run(core: EngineCore, prompts: list[Prompt], params: SamplingParams = PARAMS) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in prompts]
    for seq_id, prompt in enumerate(prompts):
        features, data = prompt.features, [*prompt.data]
        core.submit(EngineRequest(seq_id, "", prompt.token_ids, params, seed=0, features=features, feature_data=data))
    while core.has_work():
        step = core.step()
        for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True) if step else ():
            outputs[seq_id].append(token)
    return outputs


def counts_of(worker: Any) -> tuple[int, int] | None:
    store = worker._core.runner._source.images._store
    return None if store is None else (store.num_loaded, store.num_saved)


def test_an_image_is_encoded_by_one_engine_for_all(tmp_path: Path) -> None:
    path = make_vision_checkpoint(KINDS[1], tmp_path)
    made = Prompts(path)
    prompts = [made.make(f"What is in this image? {IMAGE}", [image(120, 90, seed)]) for seed in (1, 2)]
    expected, counts = generate(path, prompts)
    assert counts is None
    shared = {"ec_connector": "ECStoreConnector", "ec_connector_extra_config": {"path": str(tmp_path / "shared")}}
    assert generate(path, prompts, ec_transfer_config=shared) == (expected, (0, 2))
    assert generate(path, prompts, ec_transfer_config=shared) == (expected, (2, 0))
    for file in (tmp_path / "shared").rglob("*.kv"):
        file.write_bytes(file.read_bytes()[:-1])
    assert generate(path, prompts, ec_transfer_config=shared) == (expected, (0, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_only_encodes_has_no_more_than_the_encoder(tmp_path: Path, kind: str) -> None:
    path = make_vision_checkpoint(kind, tmp_path)
    made = Prompts(path)
    prompts = [made.make(f"What is in this image? {IMAGE}", [image(120, 90, seed)]) for seed in (1, 2)]
    expected, _ = generate(path, prompts)
    shared = {"ec_connector": "ECStoreConnector", "ec_connector_extra_config": {"path": str(tmp_path / "shared")}}
    core = make_core(path, ec_transfer_config={**shared, "ec_role": "ec_producer"})
    (held,) = core.executor.collective_rpc(lambda worker: {*worker._core.model.weight_tensors()})
    assert held
    assert all(name.startswith(".tower.") for name in held), held
    assert core.cache.layout.block_bytes(*core.executor.get_kv_cache_specs()) == 0
    texts = [made.make("Only a text", [])]
    # an image is encoded again although its prompt is known, if the workers have dropped its embeddings
    for counts in ((0, 2), (0, 4)):
        assert run(core, [*prompts, *texts], ONE_TOKEN) == [[0]] * 3
        assert core.executor.collective_rpc(counts_of) == [counts]
        core.utilities.functions["reset_encoder_cache"]()
    core.shutdown()
    consumer = {**shared, "ec_role": "ec_consumer"}
    assert generate(path, prompts, ec_transfer_config=consumer) == (expected, (2, 0))
    shutil.rmtree(tmp_path / "shared")
    assert generate(path, prompts, ec_transfer_config=consumer) == (expected, (0, 0)), "it encodes them itself"


def test_embeddings_of_other_weights_are_not_found_in_memory_nor_in_files(tmp_path: Path) -> None:
    path = make_vision_checkpoint(KINDS[1], tmp_path)
    prompts = [Prompts(path).make(f"What is in this image? {IMAGE}", [image(120, 90)])]
    shared = {"ec_connector": "ECStoreConnector", "ec_connector_extra_config": {"path": str(tmp_path / "shared")}}
    options = {"ec_transfer_config": shared, "enable_prefix_caching": False}
    expected, counts = generate(path, prompts, **options)
    assert counts == (0, 1)
    core = make_core(path, **options)
    tensors = [
        (name, each * 1.5)
        for file in sorted(path.glob("*.safetensors"))
        for name, each in load_file(file).items()
        if "visual" in name
    ]
    call = core.utilities.functions
    call["update_weights"]("start_weight_update")
    call["update_weights"]("load_weights", (tuple(tensors),))
    call["update_weights"]("finish_weight_update")
    call["take_weights"](1, "name", True, "key")
    assert run(core, prompts) != expected
    assert core.executor.collective_rpc(counts_of) == [(0, 1)]
    # what was encoded before is of no use after tensors that came without an update, either
    call["collective_rpc"]("load_weights", None, (tensors,))
    run(core, prompts)
    assert core.executor.collective_rpc(counts_of) == [(0, 2)]
    call["update_weights"]("reload_from", (str(path),))
    call["take_weights"](2, "name", True, "")
    assert run(core, prompts) == expected
    assert core.executor.collective_rpc(counts_of) == [(1, 2)]
    core.shutdown()
