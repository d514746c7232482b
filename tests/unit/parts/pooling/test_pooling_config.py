"""Options of models that pool: which engine pools, under vLLM's new and old names, and what contradicts that."""

from __future__ import annotations

import json

import pytest

from raycore.config import PoolerConfig, resolve
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig
from raycore.parts.pooling.config import parse_pooler_config

CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "head_dim": 16,
}


def resolved(path, **options):
    (path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["Qwen3Model"]}))
    return resolve(str(path), load_format="dummy", **options)


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ({}, None),
        ({"runner": "generate"}, None),
        ({"task": "generate"}, None),
        ({"pooler_config": {}}, None),
        ({"runner": "pooling"}, ["embed", "token_embed"]),
        ({"convert": "embed"}, ["embed", "token_embed"]),
        ({"task": "embed"}, ["embed", "token_embed"]),
        ({"task": "embedding"}, ["embed", "token_embed"]),
        ({"task": "classify", "hf_overrides": '{"num_labels": 3}'}, ["classify", "token_classify"]),
        ({"task": "score", "hf_overrides": {"num_labels": 1}}, ["score", "classify", "token_classify"]),
        ({"runner": "pooling", "pooler_config": {"task": "token_embed"}}, ["token_embed", "embed"]),
        ({"runner": "pooling", "override_pooler_config": '{"task": "token_embed"}'}, ["token_embed", "embed"]),
        ({"runner": "pooling", "pooler_config": PoolerConfig(task="token_embed")}, ["token_embed", "embed"]),
    ],
)
def test_a_model_that_generates_pools_if_it_is_asked_to(options, tasks):
    pooling = resolve(str(demo_model_path()), load_format="dummy", **options).model.spec.pooling
    assert (None if pooling is None else pooling.tasks) == tasks


def test_a_model_without_a_head_pools_by_itself(tmp_path):
    config = resolved(tmp_path)
    assert config.model.spec.pooling is not None
    assert config.model.spec.architecture == "Qwen3Model"
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    assert resolved(tmp_path).model.max_model_len == 77
    assert resolved(tmp_path, max_model_len=1000).model.max_model_len == 1000
    assert type(config).decode(config.encode()) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runner": "generate", "convert": "embed"}, "convert='embed' needs runner='pooling'"),
        ({"runner": "generate", "pooler_config": {"dimensions": 3}}, "pooler_config is for models that pool"),
        ({"task": "embed", "runner": "generate"}, "runner='generate' contradicts task='embed'"),
        ({"task": "classify", "convert": "embed"}, "convert='embed' contradicts task='classify'"),
        ({"pooler_config": {}, "override_pooler_config": {}}, "are the same: omit the latter"),
        ({"pooler_config": {"pooling_type": "MAX"}}, "pooling_type='MAX'"),
        ({"pooler_config": {"pooling": "LAST"}}, "unknown setting 'pooling'; did you mean pooling_type"),
        ({"pooler_config": {"max_embed_len": 3}}, "max_embed_len=3.*use truncate_prompt_tokens"),
        ({"pooler_config": {"logit_sigma": 0}}, "logit_sigma=0"),
        ({"pooler_config": {"dimensions": 0}}, "dimensions=0"),
        ({"pooler_config": PoolerConfig(dimensions=0)}, "dimensions=0"),
        ({"pooler_config": {"pooling_type": "CLS", "seq_pooling_type": "LAST"}}, "pooling_type='CLS' contradicts"),
        ({"pooler_config": {"normalize": True, "use_activation": False}}, "contradicts"),
        ({"runner": "other"}, "runner='other'"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "a model that pools"),
        ({"prepare_structured_outputs": True}, "prepare_structured_outputs=True can't be used with a model that pools"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2 can't be used"),
        ({"hf_overrides": [1]}, "hf_overrides"),
        ({"hf_overrides": {"x": object()}}, "hf_overrides"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(tmp_path, options, message):
    with pytest.raises(InvalidConfig, match=message):
        resolved(tmp_path, **options)


def test_a_saved_share_has_no_head_for_results(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["Qwen3Model"]}))
    with pytest.raises(InvalidConfig, match="load_format='sharded_state' can't be used with a model that pools"):
        resolve(str(tmp_path), load_format="sharded_state")


def test_older_names_of_settings_are_known():
    assert parse_pooler_config('{"pooling_type": "mean", "normalize": false}') == PoolerConfig(
        seq_pooling_type="MEAN", use_activation=False
    )
    assert parse_pooler_config({"pooling_type": "STEP", "logit_bias": 2.0}) == PoolerConfig(
        tok_pooling_type="STEP", logit_mean=2.0
    )
    assert parse_pooler_config(None) is None


def test_overrides_are_merged_into_config_json():
    overrides = {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 500.0}}
    spec = resolve(str(demo_model_path()), load_format="dummy", hf_overrides=overrides).model.spec
    assert spec.max_position_embeddings == 64
    assert spec.rotations[0] is not None
    assert spec.rotations[0].theta == 500.0
