"""Engines that share the embeddings of images: an image is encoded once, and gives the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vision_checkpoints import IMAGE, KINDS, Prompt, Prompts, image, make_vision_checkpoint

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def generate(path: Path, prompts: list[Prompt], **options: Any) -> tuple[list[list[int]], Any]:
    """Returns each prompt's tokens, and the counts of what was loaded and saved."""
    config = resolve(path, dtype="float32", num_threads=1, max_num_seqs=4, max_num_batched_tokens=64, **options)
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    outputs: list[list[int]] = [[] for _ in prompts]
    for seq_id, prompt in enumerate(prompts):
        features, data = prompt.features, [*prompt.data]
        core.submit(EngineRequest(seq_id, "", prompt.token_ids, PARAMS, seed=0, features=features, feature_data=data))
    while core.has_work():
        step = core.step()
        for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True) if step else ():
            outputs[seq_id].append(token)
    (counts,) = core.executor.collective_rpc(counts_of)
    core.shutdown()
    return outputs, counts


def counts_of(worker: Any) -> tuple[int, int] | None:
    store = worker._runner._images._store
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
