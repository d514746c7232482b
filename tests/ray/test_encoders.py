"""Encoders on several workers and ranks: results are transformers' own, also after a death."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from encoder_checkpoints import FAMILIES, HEADS, make_encoder, reference
from encoder_equality import check_results, prompts
from faults import signal_in_step
from pooled_equality import TOLERANCE

from raycore import LLM
from raycore.engine.core import EngineCore
from raycore.errors import InvalidRequest
from raycore.text.tokenizer import Tokenizer

ARCHITECTURES = [family + HEADS[2 * (index % 2)] for index, family in enumerate(FAMILIES)]
"""A model of each family, with and without a head for classes."""
LIMITS = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 130}


@pytest.mark.parametrize("workers", [(2, 1, 1, 1)], ids=["tp2"], indirect=True)
def test_results_on_two_tensor_parallel_ranks_are_those_of_transformers(workers, tmp_path):
    for architecture in ARCHITECTURES:
        check_results(
            architecture,
            tmp_path / architecture,
            lambda config: EngineCore(config, workers.for_engine(config)),
            tensor_parallel_size=2,
        )


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("reranker"), "BertForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def llm(ray_cluster, reranker):
    with LLM(str(reranker), data_parallel_size=2, standby_delay_s=None, **LIMITS) as llm:
        yield llm


def test_a_killed_rank_changes_no_result(llm, reranker):
    network = reference(reranker)
    with torch.inference_mode():
        expected = [network(torch.tensor([prompt])).logits[0].sigmoid().numpy() for prompt in prompts()]
    victim = llm.engine_infos[0]
    signal_in_step(llm, victim.dp_rank, victim.pid, num_steps=2)
    found = llm.encode(prompts() * 4, pooling_task="classify", use_tqdm=False)
    for each, probs in zip(found, expected * 4, strict=True):
        np.testing.assert_allclose(each.outputs.data, probs, atol=TOLERANCE)


def test_pairs_are_scored_with_types_of_tokens(llm, reranker):
    network, tokenizer = reference(reranker), Tokenizer.from_dir(reranker)
    texts = ["jumps over the lazy dog", "fox fox", "hello"]
    joined = list(tokenizer.encode_pairs([("the quick fox", text) for text in texts]))
    with torch.inference_mode():
        expected = [
            network(torch.tensor([pair.token_ids]), token_type_ids=torch.tensor([pair.type_ids])).logits.sigmoid()
            for pair in joined
        ]
    for each, theirs in zip(llm.score("the quick fox", texts, use_tqdm=False), expected, strict=True):
        assert each.outputs.score == pytest.approx(theirs.item(), abs=TOLERANCE)


def test_an_encoder_sleeps_and_says_what_it_can_do(llm):
    before = llm.classify(prompts(), use_tqdm=False)
    llm.sleep(level=2)
    llm.wake_up()
    for each, earlier in zip(llm.classify(prompts(), use_tqdm=False), before, strict=True):
        assert each.outputs.probs == pytest.approx(earlier.outputs.probs, abs=TOLERANCE)
    with pytest.raises(InvalidRequest, match="supports only the tasks 'classify', 'score', not 'generate'"):
        llm.generate("the fox")
    with pytest.raises(InvalidRequest, match="129 tokens, more than max_model_len=128"):
        llm.classify([[5] * 129])
    assert llm.get_supported_tasks() == ("classify", "score")
