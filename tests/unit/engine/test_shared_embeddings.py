"""Engines that share the embeddings of images: an image is encoded once, and gives the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vision_checkpoints import IMAGE, KINDS, Prompt, Prompts, image, make_vision_checkpoint

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


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


def run(core: EngineCore, prompts: list[Prompt]) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in prompts]
    for seq_id, prompt in enumerate(prompts):
        features, data = prompt.features, [*prompt.data]
        core.submit(EngineRequest(seq_id, "", prompt.token_ids, PARAMS, seed=0, features=features, feature_data=data))
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
