"""A rank's engine computes encoders as transformers and sentence-transformers do, each prompt whole and in one step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from encoder_checkpoints import FAMILIES, HEADS, as_sentence_transformer, make_encoder, reference
from encoder_equality import check_results, configured, prompts
from pooled_equality import TOLERANCE, pool

from raycore.client.inputs import parse_prompts
from raycore.errors import InvalidCheckpoint, InvalidConfig, InvalidRequest
from raycore.messages import EngineRequest
from raycore.parts.pooling.client.pooling import PLACEHOLDER, resolved
from raycore.text.pairs import PairFormat, pair_prompts
from raycore.text.tokenizer import Tokenizer

ARCHITECTURES = [family + head for family in FAMILIES for head in HEADS if head != "ForMaskedLM"]
PAIRS = [("the quick fox", "jumps over the lazy dog"), ("fox", "the the"), ("hello world", "x" * 40)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_results_are_those_of_transformers(tmp_path, make_core, architecture):
    check_results(architecture, tmp_path, make_core)


@pytest.mark.parametrize(
    ("architecture", "pooling", "normalizes"),
    [("BertModel", "mean", True), ("BertModel", "cls", True), ("XLMRobertaModel", "mean", False)],
)
def test_embeddings_are_those_of_sentence_transformers(tmp_path, make_core, architecture, pooling, normalizes):
    from sentence_transformers import SentenceTransformer  # a second in each process that collects tests

    path = as_sentence_transformer(make_encoder(tmp_path, architecture), pooling, normalizes=normalizes)
    peer = SentenceTransformer(str(path), device="cpu")
    core = make_core(configured(path))
    assert core.config.model.max_model_len == 100, "of sentence_bert_config.json"
    some = [prompt[:100] for prompt in prompts()]
    found, _ = pool(core, "embed", some)
    for prompt, own in zip(some, found, strict=True):
        token_ids = torch.tensor([prompt])
        with torch.inference_mode():
            made = peer({"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)})
        np.testing.assert_allclose(own, made["sentence_embedding"][0].numpy(), atol=10 * TOLERANCE)
    text = "the quick brown fox"
    (prompt,) = parse_prompts([text], Tokenizer.from_dir(path))
    ((own,), _) = pool(core, "embed", [prompt.token_ids])
    np.testing.assert_allclose(own, peer.encode(text), atol=10 * TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_are_scored_as_transformers_scores_them(tmp_path, make_core, family):
    path = make_encoder(tmp_path, f"{family}ForSequenceClassification", num_labels=1)
    core, tokenizer, network = make_core(configured(path)), Tokenizer.from_dir(path), reference(path)
    spec = core.config.model.spec.pooling
    assert spec is not None
    parsed = parse_prompts(list(pair_prompts(tokenizer, PAIRS, PairFormat(spec.pairs == "pair"))), tokenizer)
    assert all(bool(prompt.second_text) == (family == "Bert") for prompt in parsed)
    for seq_id, prompt in enumerate(parsed):
        params = resolved(None, "score", spec)
        request = EngineRequest(seq_id, "", prompt.token_ids, PLACEHOLDER, 0, pooling=params)
        request.second_text = prompt.second_text
        core.submit(request)
    found: dict[int, float] = {}
    while core.has_work():
        outputs = core.step()
        found |= {seq_id: np.frombuffer(each.data, np.float32)[0] for seq_id, each in outputs.pooled}
    for seq_id, (prompt, joined) in enumerate(zip(parsed, tokenizer.encode_pairs(PAIRS), strict=True)):
        types = {"token_type_ids": torch.tensor([joined.type_ids])} if family != "ModernBert" else {}
        with torch.inference_mode():
            logits = network(torch.tensor([prompt.token_ids]), **types).logits
        assert found[seq_id] == pytest.approx(logits.sigmoid().item(), abs=TOLERANCE)


def test_types_of_tokens_are_a_first_text_and_then_a_second_one(tmp_path):
    tokenizer = Tokenizer.from_dir(make_encoder(tmp_path))

    def second_text(types):
        return parse_prompts([{"prompt_token_ids": [5, 6, 7], "token_type_ids": types}], tokenizer)[0].second_text

    assert [second_text(types) for types in ([0, 0, 0], [0, 0, 1], [0, 1, 1])] == [0, 2, 1]
    for types in ([0, 1, 0], [1, 1, 1], [0, 0], [0, 0, 2], "0"):
        with pytest.raises(InvalidRequest, match="token_type_ids"):
            second_text(types)


def test_steps_have_room_for_the_longest_prompt(tmp_path):
    path = make_encoder(tmp_path)
    config = configured(path, max_num_batched_tokens=None)
    assert config.scheduler.max_num_batched_tokens == 2048
    assert not config.cache.enable_prefix_caching
    with pytest.raises(InvalidConfig, match=r"max_num_batched_tokens=64 is below max_model_len=128"):
        configured(path, max_num_batched_tokens=64)
    assert configured(path, max_num_batched_tokens=64, max_model_len=64).scheduler.max_model_len == 64


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 2},
        {"enable_lora": True},
        {"enable_prefix_caching": True},
        {"kv_cache_dtype": "fp8"},
        {"long_prefill_token_threshold": 16},
        {"runner": "generate"},
        {"convert": "classify"},
        {"load_format": "sharded_state"},
    ],
)
def test_what_encoders_cannot_do_is_refused_by_name(tmp_path, options):
    (name,) = options
    with pytest.raises((InvalidConfig, InvalidCheckpoint), match=name):
        configured(make_encoder(tmp_path), **options)


def test_quantized_and_random_weights_give_embeddings(tmp_path, make_core):
    path = make_encoder(tmp_path)
    exact, _ = pool(make_core(configured(path)), "embed", prompts())
    rounded, _ = pool(make_core(configured(path, quantization="int8")), "embed", prompts())
    assert min(float(a @ b) for a, b in zip(exact, rounded, strict=True)) > 0.99
    random_ones, _ = pool(make_core(configured(path, load_format="dummy")), "embed", prompts())
    assert all(np.isfinite(each).all() for each in random_ones)
