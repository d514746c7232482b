"""What a checkpoint says of pooling, in config.json and in sentence-transformers' files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raycore.checkpoint.model_spec import load_model_spec, pools_by_itself, read_config
from raycore.checkpoint.sentence_transformers import max_sequence_length, read_modules
from raycore.errors import InvalidCheckpoint
from raycore.parts.pooling.models.forms import PoolingChoice, pooling_form
from raycore.parts.pooling.models.late_interaction import LateInteraction
from raycore.parts.pooling.models.pooling import HeadActivation, HeadLinear, HeadNorm, HeadRows, PoolingSpec

CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "head_dim": 16,
}


def spec_of(path: Path, choice: PoolingChoice | None = None, **config: Any) -> PoolingSpec:
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    pooling = load_model_spec(path, pooling=choice or PoolingChoice()).pooling
    assert pooling is not None
    return pooling


@pytest.mark.parametrize(
    ("architecture", "base", "form"),
    [
        ("Qwen3Model", "Qwen3ForCausalLM", "model"),
        ("Gemma3TextModel", "Gemma3ForCausalLM", "model"),
        ("Gemma3TextForSequenceClassification", "Gemma3ForCausalLM", "sequence"),
        ("LlamaForCausalLM", "LlamaForCausalLM", "generate"),
        ("Gemma3ForConditionalGeneration", "Gemma3ForConditionalGeneration", "generate"),
        ("Qwen2ForProcessRewardModel", "Qwen2ForCausalLM", "process_reward"),
        ("Qwen2ForRewardModel", "Qwen2ForCausalLM", "reward"),
        ("GPT2LMHeadModel", "GPT2LMHeadModel", "generate"),
        ("MistralForTokenClassification", "MistralForCausalLM", "tokens"),
    ],
)
def test_the_end_of_an_architectures_name_says_what_is_on_top(architecture, base, form):
    assert pooling_form(architecture) == (base, form)
    assert pooling_form("Model") is None


@pytest.mark.parametrize(
    ("config", "tasks", "num_labels", "activation"),
    [
        ({"architectures": ["Qwen3Model"]}, ["embed", "token_embed"], 0, "softmax"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, ["classify", "token_classify"], 2, "softmax"),
        (
            {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "fits"}},
            ["classify", "token_classify", "score"],
            1,
            "sigmoid",
        ),
        (
            {
                "architectures": ["Qwen3ForSequenceClassification"],
                "num_labels": 3,
                "problem_type": "multi_label_classification",
            },
            ["classify", "token_classify"],
            3,
            "sigmoid",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "problem_type": "regression"},
            ["classify", "token_classify", "score"],
            1,
            "none",
        ),
        (
            {
                "architectures": ["LlamaForSequenceClassification"],
                "num_labels": 1,
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            ["classify", "token_classify", "score"],
            1,
            "none",
        ),
        ({"architectures": ["Qwen2ForRewardModel"]}, ["token_classify"], 1, "sigmoid"),
        ({"architectures": ["Qwen2ForProcessRewardModel"]}, ["token_classify"], 2, "softmax"),
    ],
)
def test_an_architecture_and_its_labels_say_what_it_pools(tmp_path, config, tasks, num_labels, activation):
    found = spec_of(tmp_path, **config)
    assert (found.tasks, found.num_labels, found.class_activation) == (tasks, num_labels, activation)
    assert pools_by_itself(tmp_path, read_config(tmp_path))


def test_labels_have_their_names_in_the_order_of_their_numbers(tmp_path):
    labels = {"1": "sad", "0": "glad", "10": "mad", "2": "bad"}
    found = spec_of(tmp_path, architectures=["LlamaForSequenceClassification"], id2label=labels)
    assert found.labels == ["glad", "sad", "bad", "mad"]
    with pytest.raises(InvalidCheckpoint, match="id2label"):
        spec_of(tmp_path, architectures=["LlamaForSequenceClassification"], id2label={"a": "b"})


def test_users_choose_in_place_of_the_checkpoint(tmp_path):
    choice = PoolingChoice(convert="classify", sequence="MEAN", logit_mean=0.5, task="token_classify")
    found = spec_of(tmp_path, choice, architectures=["LlamaForCausalLM"], num_labels=1)
    assert (found.sequence, found.logit_mean) == ("MEAN", 0.5)
    assert found.tasks == ["token_classify", "classify", "score"]
    found = spec_of(tmp_path, PoolingChoice(convert="embed"), architectures=["Qwen2ForSequenceClassification"])
    assert (found.tasks, found.classify) == (["embed", "token_embed"], [])


def test_tokens_of_the_head_for_texts_are_classes(tmp_path):
    reranker = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    choice = PoolingChoice(class_tokens=[5, 3])
    found = spec_of(tmp_path, choice, **reranker, is_original_qwen3_reranker=True)
    assert found.classify == [HeadRows("head", 100, 64, [5, 3], is_difference=True)]
    assert (found.num_labels, found.pairs, found.class_tokens) == (1, "text", None)
    found = spec_of(tmp_path, choice, **reranker, method="no_post_processing", tie_word_embeddings=True)
    assert found.classify == [HeadRows("embedding", 100, 64, [5, 3])]
    assert (found.num_labels, found.class_tokens) == (2, [5, 3])
    found = spec_of(tmp_path, PoolingChoice(returned_token_ids=[8, 9]), architectures=["MistralForCausalLM"])
    assert (found.class_tokens, found.returned_token_ids) == ([8, 9], None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Qwen2Model"], "is_causal": False}, "is_causal"),
        ({"architectures": ["StrangeModel"]}, "architectures.*StrangeModel.*a decoder that raycore has a family for"),
        ({"architectures": ["LlamaForSequenceClassification"], "problem_type": "odd"}, "problem_type='odd'"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path, config, message):
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, **config)


def write_modules(
    path: Path, *modules: tuple[str, dict[str, Any] | None], prefix: str = "sentence_transformers.models"
):
    listed = []
    for index, (kind, config) in enumerate(modules):
        folder = "" if config is None else f"{index}_{kind}"
        if config is not None:
            (path / folder).mkdir(exist_ok=True)
            (path / folder / "config.json").write_text(json.dumps(config))
        listed.append({"idx": index, "name": str(index), "path": folder, "type": f"{prefix}.{kind}"})
    (path / "modules.json").write_text(json.dumps(listed))


def test_modules_become_a_head(tmp_path):
    dense = {"in_features": 64, "out_features": 8}
    plain = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    write_modules(
        tmp_path,
        ("Transformer", None),
        ("Pooling", {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}),
        ("Dense", dense),
        ("Dropout", None),
        ("LayerNorm", {"dimension": 8}),
        (
            "Dense",
            {**dense, "in_features": 8, **plain},
        ),
        ("Normalize", None),
    )
    for folder in ("2_Dense", "5_Dense"):
        save_file({"linear.weight": torch.zeros(1)}, tmp_path / folder / "model.safetensors")
    found = read_modules(tmp_path)
    assert found is not None
    assert found.head == [
        HeadLinear("linear.weight", 8, 64, "linear.bias", "2_Dense"),
        HeadActivation("tanh"),
        HeadNorm("norm.weight", 8, bias="norm.bias", folder="4_LayerNorm"),
        HeadLinear("linear.weight", 8, 8, None, "5_Dense"),
    ]
    assert (found.pooling, found.is_normalized, found.embedding_size) == ("LAST", True, 8)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    spec = spec_of(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert pools_by_itself(tmp_path, read_config(tmp_path)), "sentence-transformers' files count more than the head"
    assert (spec.embedding_size, spec.max_length, spec.use_activation) == (8, 77, True)
    assert max_sequence_length(tmp_path / "2_Dense") is None


def test_newer_files_name_the_kind_of_pooling_and_modules_in_other_places(tmp_path):
    write_modules(
        tmp_path,
        ("Transformer", None),
        ("Pooling", {"pooling_mode": ["cls"], "embedding_dimension": 64}),
        prefix="sentence_transformers.sentence_transformer.modules.x",
    )
    assert read_modules(tmp_path) == ("CLS", [], False, None)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("Pooling", {"pooling_mode_max_tokens": True})], "asks for pooling_mode_max_tokens: expected one of"),
        (
            [("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True})],
            "cls_token and pooling",
        ),
        ([("Pooling", {})], "asks for nothing"),
        ([("Pooling", {"pooling_mode": "weightedmean"})], "pooling_mode='weightedmean'"),
        ([("CNN", {})], "a module of type 'CNN' isn't supported"),
        ([("Dense", {"in_features": 1, "out_features": 1})], "has no model.safetensors"),
        ([("Dense", {"in_features": 1, "out_features": 1, "use_residual": True})], "model.safetensors|use_residual"),
    ],
)
def test_modules_that_are_not_known_are_refused(tmp_path, modules, message):
    write_modules(tmp_path, *modules)
    with pytest.raises(InvalidCheckpoint, match=message):
        read_modules(tmp_path)


@pytest.mark.parametrize("text", ["[", "{}", '[{"type": "Pooling"}]', '[{"type": "x.Pooling", "path": "../up"}]'])
def test_a_damaged_list_of_modules_is_refused(tmp_path, text):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(InvalidCheckpoint, match=r"modules\.json"):
        read_modules(tmp_path)


def test_decoders_refuse_masks_that_no_token_sees(tmp_path):
    late = LateInteraction(7, 8, 12, 9, expansion_token=6)
    with pytest.raises(InvalidCheckpoint, match="Expected attend_to_expansion_tokens=true or do_query_expansion=false"):
        spec_of(tmp_path, PoolingChoice(late=late), architectures=["Qwen3Model"])
    for other in (
        LateInteraction(7, 8, 12, 9),
        LateInteraction(7, 8, 12, 9, expansion_token=6, attends_to_expansion=True),
    ):
        assert spec_of(tmp_path, PoolingChoice(late=other), architectures=["Qwen3Model"]).late == other
    classes = spec_of(tmp_path, PoolingChoice(late=late), architectures=["Qwen3ForSequenceClassification"])
    assert classes.late is None


@pytest.mark.parametrize("architecture", ["HF_ColBERT", "ColBERT"])
def test_colbert_is_read_only_on_top_of_bert(tmp_path, architecture):
    with pytest.raises(InvalidCheckpoint, match=r"model_type='xlm-roberta': expected bert, because .*ColBERT"):
        spec_of(tmp_path, architectures=[architecture], model_type="xlm-roberta")
