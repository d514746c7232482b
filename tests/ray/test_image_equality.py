"""Prompts with images on engines with several workers and ranks: tokens are transformers' own, also after deaths."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from equality import reload
from faults import signal_in_step
from image_prompts import GREEDY, Prompting, config_of, make_case
from vision_checkpoints import GEMMA3, IMAGE, MODELS, QWEN2_5, QWEN3, QWEN3_MOE, image

from raycore import LLM
from raycore.engine.core import EngineCore

# workers can't import a test module, so what they are to call travels whole
cloudpickle.register_pickle_by_value(sys.modules[reload.__module__])


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    directory = tmp_path_factory.mktemp("images")
    # with stages, embeddings go to the first three layers of Qwen3-VL
    deeper = {kind: {"num_hidden_layers": 4} for kind in (QWEN3, QWEN3_MOE)}
    return {kind: make_case(kind, directory, **deeper.get(kind, {})) for kind in MODELS}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "workers",
    [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2), (4, 1, 2, 1)],
    ids=["tp2", "pp2", "pcp2", "tp4-dcp2"],
    indirect=True,
)
def test_tokens_are_those_of_transformers(workers, cases, kind):
    case = cases[kind]
    shape = dict(workers.shape)
    if kind in (QWEN3, QWEN3_MOE) and shape["pipeline_parallel_size"] == 2:
        shape["pipeline_layers"] = "3,1"
    blocks = 46 if kind == GEMMA3 else 30
    for options in (
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 24, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 24, "block_size": 4 // workers.num_shares, "num_gpu_blocks_override": blocks},
    ):
        config = config_of(case.path, **shape, **options)
        engine = Prompting(EngineCore(config, workers.for_engine(config)))
        assert engine.generate(case.prompts) == case.expected, options
        engine.core.shutdown()


def test_a_killed_rank_changes_no_token(ray_cluster, cases):
    case = cases[QWEN2_5]
    images = [image(120, 90), image(120, 90, 1)]
    placed = "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"What is in this image? {IMAGE} Describe it.".replace(IMAGE, placed)
    prompts = [{"prompt": text, "multi_modal_data": {"image": each}} for each in images]
    options = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    with LLM(str(case.path), data_parallel_size=2, standby_delay_s=None, **options) as llm:
        for is_killed in (False, True):
            if is_killed:
                victim = llm.engine_infos[0]
                signal_in_step(llm, victim.dp_rank, victim.pid, num_steps=3)
            found = llm.generate(prompts * 3, GREEDY, use_tqdm=False)
            assert [list(each.outputs[0].token_ids) for each in found] == case.expected[:2] * 3
