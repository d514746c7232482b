"""What starts clusters and applications, by Ray's own checks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import ray
import yaml
from jsonschema import ValidationError
from ray._common.utils import import_attr
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start
from ray.serve.schema import ServeDeploySchema

from raycore.config import resolve
from raycore.demo import demo_model_path

ROOT = Path(__file__).parents[2]
MANIFESTS = ["cluster.yaml", "examples/kuberay/rayjob.yaml", "examples/kuberay/rayservice.yaml"]
LAUNCHER = ROOT / "examples/ray_up/cluster.yaml"


def launcher() -> dict:
    return yaml.safe_load(LAUNCHER.read_text())


def groups(name: str) -> list[dict]:
    """A manifest's head and workers."""
    (spec,) = [each["spec"] for each in documents(name) if each["apiVersion"] == "ray.io/v1"]
    cluster = spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def containers(name: str) -> list[dict]:
    return [group["template"]["spec"]["containers"][0] for group in groups(name)]


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((ROOT / name).read_text()))


def options_of(command, arguments: str) -> dict:
    """As Ray's command line understands them; it exits when it doesn't."""
    return command.make_context(command.name, shlex.split(arguments)).params


def test_ray_up_accepts_the_launcher_file():
    config = prepare_config(launcher())
    validate_config(config)
    assert config["provider"]["type"] == "aws"
    assert "autoscaling-config" in config["head_start_ray_commands"][-1]


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("max_workers:", "max_worker:", "'max_worker' was unexpected"),
        ("head_node_type: head", "head_node_type: heads", "must be one of `available_node_types`"),
    ],
)
def test_the_check_of_the_launcher_file_finds_a_mistake(right, wrong, message):
    with pytest.raises((ValueError, ValidationError), match=message):
        validate_config(prepare_config(yaml.safe_load(LAUNCHER.read_text().replace(right, wrong, 1))))


def test_the_launchers_commands_are_rays():
    config = launcher()
    for command in (config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1]):
        assert options_of(start, command.partition("ray start ")[2].replace("$RAY_HEAD_IP", "10.0.0.1"))
    for name in re.findall(r"examples/\S+", LAUNCHER.read_text()):
        assert (ROOT / name.rstrip(":")).exists(), name
    for path in (path for path in config["file_mounts"].values() if not path.startswith("~")):
        assert (ROOT / path).exists()


@pytest.mark.parametrize("name", MANIFESTS)
def test_variables_of_rays_in_manifests_are_known_to_ray(name):
    package = Path(ray.__file__).parent
    files = [package / "_private/ray_constants.py", *(package / "dashboard/modules/job").glob("*.py")]
    python = b"".join(path.read_bytes() for path in files)
    binary = (package / "core/src/ray/raylet/raylet").read_bytes()
    entries = [entry["name"] for container in containers(name) for entry in container["env"]]
    names = {entry for entry in entries if entry.startswith("RAY_")}
    assert names
    unknown = {each for each in names if each.encode() not in python and each[4:].encode() not in binary}
    assert unknown == set()


def test_the_service_serves_the_application_of_this_repository():
    (document,) = documents("examples/kuberay/rayservice.yaml")
    config = ServeDeploySchema.model_validate(yaml.safe_load(document["spec"]["serveConfigV2"]))
    (app,) = config.applications
    built = import_attr(app.import_path)(app.args)
    (deployment,) = app.deployments
    assert built._bound_deployment.name == deployment.name
    _, engine_options = built._bound_deployment.init_args
    workers = document["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert resolve(demo_model_path(), **engine_options).parallel.data_parallel_size <= sum(
        group["replicas"] * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
        - deployment.ray_actor_options.num_cpus
        for group in workers
    )


@pytest.mark.parametrize("name", MANIFESTS)
def test_kuberay_starts_nodes_with_flags_that_ray_has(name):
    for group in groups(name):
        flags = shlex.join(f"--{flag}={value}" for flag, value in group["rayStartParams"].items())
        assert options_of(start, flags)["object_store_memory"] == int(group["rayStartParams"]["object-store-memory"])
