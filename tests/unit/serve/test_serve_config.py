"""What `build_openai_app` takes, and what replicas and deployments get of it. Serve itself doesn't run."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from raycore.errors import InvalidConfig
from raycore.serve import build_openai_app
from raycore.serve.app import deployment_fields
from raycore.serve.config import Arguments, ModelDeployment, arguments, deployment_options, model_config

KNOWN = ["name", "num_replicas", "autoscaling_config", "max_ongoing_requests", "ray_actor_options"]


def fields(**more: Any) -> dict[str, Any]:
    return {"model_loading_config": {"model_id": "m", "model_source": "path"}, **more}


def config(**more: Any) -> ModelDeployment:
    return model_config("here", fields(**more))


def test_models_have_the_fields_of_the_installed_ray():
    llm = pytest.importorskip("ray.llm._internal.serve.core.configs.llm_config")
    assert set(ModelDeployment.__struct_fields__) == set(llm.LLMConfig.model_fields)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"llm_config": []}, "build_openai_app: unknown setting 'llm_config'; did you mean llm_configs?"),
        ({"llm_configs": []}, "llm_configs is empty"),
        ({"llm_configs": [3]}, r"llm_configs\[0\]=3 isn't a dict, the path of a YAML file, or an LLMConfig"),
        ({"llm_configs": ["nowhere.yaml"]}, "nowhere.yaml'?: there is no such file"),
        ({"llm_configs": [fields(), fields()]}, "2 models have the model_id 'm'"),
        ({"llm_configs": [fields(server_cls="a.b")]}, r"llm_configs\[0\]: server_cls is for ray.serve.llm"),
        ({"llm_configs": [fields()], "ingress_cls_config": {"ingress_cls": "a.b"}}, "ingress_cls_config="),
        ({"llm_configs": [fields()], "ingress_deployment_config": {"num_replica": 2}}, "unknown option 'num_replica'"),
        ({"llm_configs": [fields(deployment_config={"max_ongoing": 2})]}, "deployment_config of 'm': unknown option"),
        (
            {"llm_configs": [fields(deployment_config={"placement_group_bundles": []})]},
            "placement_group_bundles: the engine has its own placement groups",
        ),
        (
            {"llm_configs": [fields(deployment_config={"num_replicas": 2, "autoscaling_config": {}})]},
            "deployment_config of 'm': Manually setting num_replicas",
        ),
        (
            {"llm_configs": [fields(deployment_config={"autoscaling_config": {"max_replicas": "x"}})]},
            "deployment_config of 'm'",
        ),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_starts(given, message):
    with pytest.raises(InvalidConfig, match=message):
        build_openai_app(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_loading_config": {}}, "here: model_loading_config: model_id is missing"),
        ({"model_loading_config": {"model_id": ""}}, "model_id is empty"),
        ({"model_loading_config": {"model_id": "m", "model_sauce": 1}}, "'model_sauce'; did you mean model_source?"),
        ({"model_loading_config": {"model_id": "m", "model_source": {"bucket_uri": "s3://b"}}}, "mirrors no buckets"),
        ({"engine_kwargs": {"max_num_seq": 3}}, "here: unknown option 'max_num_seq'; did you mean max_num_seqs?"),
        ({"engine_kwargs": {"max_num_seqs": 0}}, "here: max_num_seqs=0"),
        ({"engine_kwargs": {"model": "another"}}, "engine_kwargs has model='another', but model_source='path'"),
        ({"engine_kwargs": {"api_key": "k"}}, "unknown option 'api_key'"),
        ({"lora_config": {"max_num_adapters_per_replica": 0}}, "max_num_adapters_per_replica=0"),
        ({"lora_config": {}, "engine_kwargs": {"enable_lora": False}}, "enable_lora=False"),
        ({"placement_group_config": {"strategy": "PACK"}}, "placement_group_config="),
        ({"accelerator_config": {"kind": "tpu"}}, "kind='tpu' is not supported"),
        ({"experimental_configs": {"magic": 1}}, "experimental_configs: 'magic' is not supported"),
        ({"callback_config": {"callback_class": "a.b"}}, "callback_config="),
    ],
)
def test_a_wrong_field_of_a_model_is_named(given, message):
    with pytest.raises(InvalidConfig, match=message):
        model_config("here", fields() | given)


def test_a_model_becomes_options_of_an_engine_and_of_a_server():
    made = arguments(
        config(
            engine_kwargs={"max_num_seqs": 8, "enable_force_include_usage": True, "enforce_eager": True},
            placement_group_config={"bundle_per_worker": {"CPU": 2}},
            accelerator_type="H100",
            log_engine_metrics=False,
        )
    )
    resources = {"CPU": 2, "accelerator_type:H100": 0.001}
    assert made.server == {"enable_force_include_usage": True, "served_model_name": ["m"]}
    assert made.engine["model"] == "path"
    assert (made.engine["max_num_seqs"], made.engine["resources_per_worker"]) == (8, resources)
    assert not made.exports_metrics
    assert pickle.loads(pickle.dumps(made)) == made


def test_an_engine_holds_as_many_adapters_as_a_replica():
    made = arguments(config(lora_config={"max_num_adapters_per_replica": 5}))
    assert [made.engine[name] for name in ("enable_lora", "max_loras", "max_cpu_loras")] == [True, 5, 5]
    made = arguments(config(lora_config={"max_num_adapters_per_replica": 5}, engine_kwargs={"max_loras": 2}))
    assert (made.engine["max_loras"], made.engine["max_cpu_loras"]) == (2, 5)


def test_a_deployment_reserves_no_cpu_and_scales_by_what_an_engine_computes_at_a_time():
    options = deployment_options(config(), KNOWN)
    assert options == {"name": "raycore:m", "max_ongoing_requests": 4096, "ray_actor_options": {"num_cpus": 0}}
    given = {"autoscaling_config": {"max_replicas": 3}, "ray_actor_options": {"num_cpus": 1}, "name": "mine"}
    kwargs = {"max_num_seqs": 8, "data_parallel_size": 2, "max_concurrent_requests": 9}
    options = deployment_options(
        config(deployment_config=given, engine_kwargs=kwargs, runtime_env={"env_vars": {"A": "b"}}), KNOWN
    )
    assert options["autoscaling_config"] == {"max_replicas": 3, "target_ongoing_requests": 16}
    assert options["ray_actor_options"] == {"num_cpus": 1, "runtime_env": {"env_vars": {"A": "b"}}}
    assert (options["name"], options["max_ongoing_requests"]) == ("mine", 9)
    options = deployment_options(config(deployment_config={"num_replicas": "auto"}), KNOWN)
    assert options["autoscaling_config"] == {"target_ongoing_requests": 256}


def test_a_model_may_be_in_a_file(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("model_loading_config: {model_id: from-a-file, model_source: path}\n")
    app: Any = build_openai_app({"llm_configs": [str(path)]})
    assert app._bound_deployment.name == "raycore:from-a-file"
    path.write_text("model_loading_config: {model_id")
    with pytest.raises(InvalidConfig, match="can't be read"):
        build_openai_app({"llm_configs": [str(path)]})


def test_a_model_that_is_alone_takes_requests_itself():
    app: Any = build_openai_app({"llm_configs": [fields()]})
    (given,) = app._bound_deployment.init_args
    assert isinstance(given, Arguments)
    several = {"model_loading_config": {"model_id": "another"}}
    for more in (
        {"llm_configs": [fields(), several]},
        {"llm_configs": [fields(lora_config={"dynamic_lora_loading_path": "/adapters"})]},
        {"llm_configs": [fields()], "ingress_deployment_config": {"num_replicas": 2}},
    ):
        app = build_openai_app(more)
        assert app._bound_deployment.name == "raycore-ingress"
    assert app._bound_deployment.num_replicas == 2


def test_serves_own_options_are_known():
    assert {"autoscaling_config", "num_replicas", "graceful_shutdown_timeout_s"} <= set(deployment_fields())
