"""The Kubernetes manifests, the image and the quick start say what the rest of the repository says."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from kuberay_definitions import CARRIED, CRDS, carried_text, mistakes
from packaging.specifiers import SpecifierSet

from raycore.cli.main import build_parser
from raycore.config import RecoveryConfig

ROOT = Path(__file__).parents[2]
MANIFESTS = ["cluster.yaml", "examples/kuberay/rayjob.yaml", "examples/kuberay/rayservice.yaml"]
PROJECT: dict[str, Any] = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(
    (ROOT / "pyproject.toml").read_text()
)["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
QUICKSTART = (ROOT / "docs/quickstart-kuberay.md").read_text()


@cache
def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.load_all((ROOT / name).read_text(), yaml.CSafeLoader))


def ray_document(name: str) -> dict[str, Any]:
    return next(document for document in documents(name) if document["apiVersion"] == "ray.io/v1")


def cluster_spec(name: str) -> dict[str, Any]:
    spec = ray_document(name)["spec"]
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec


def groups(name: str) -> list[dict[str, Any]]:
    spec = cluster_spec(name)
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every group of every manifest, with its pods' spec."""
    for name in MANIFESTS:
        for group in groups(name):
            yield group, group["template"]["spec"]


def containers() -> Iterator[dict[str, Any]]:
    for _, pod in pods():
        yield from pod["containers"]


def requirement(package: str) -> str:
    """The versions of a package that raycore takes."""
    (found,) = [
        match[1] for line in PROJECT["dependencies"] if (match := re.match(rf"{package}(?:\[\w+\])?(.*)", line))
    ]
    return found


def docker_argument(name: str) -> str:
    return re.search(rf"^ARG {name}=(\S+)$", DOCKERFILE, re.MULTILINE)[1]


def quantity(text: str) -> int:
    """Bytes, of Kubernetes' spelling."""
    return int(text.removesuffix("Gi")) << 30 if text.endswith("Gi") else int(text)


# ---- KubeRay's own word


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_conform_to_kuberays_schema(name):
    assert mistakes(ray_document(name)) == []


@pytest.mark.skipif(not CRDS.is_dir(), reason=f"KubeRay's files aren't at {CRDS} (KUBERAY_CRDS)")
def test_what_is_carried_of_kuberays_definitions_is_what_its_files_say():
    assert CARRIED.read_text() == carried_text(CRDS)


def test_the_check_of_manifests_finds_a_mistake():
    text = (ROOT / "cluster.yaml").read_text()
    for right, wrong in (
        ("minReplicas: 1", "minReplica: 1"),
        ("periodSeconds:", "everySeconds:"),
        ("sizeLimit: 2Gi", "sizeLimit: [2]"),
        ("version: v2", "version: v3"),
        ("periodSeconds: 5", "periodSeconds: often"),
    ):
        assert right in text
        assert mistakes(yaml.load(text.replace(right, wrong, 1), yaml.CSafeLoader)) != [], wrong


# ---- the rest of the repository's


def test_the_versions_of_ray_and_python_agree_in_manifests_and_the_dockerfile():
    ray_version = docker_argument("RAY_VERSION")
    assert {cluster_spec(name)["rayVersion"] for name in MANIFESTS} == {ray_version}
    assert ray_version in SpecifierSet(requirement("ray"))
    assert f"ray[default]=={ray_version}" in QUICKSTART
    assert docker_argument("PYTHON_VERSION") in SpecifierSet(PROJECT["requires-python"])


def test_images_of_manifests_are_those_built_by_the_dockerfiles_commands():
    images = {container["image"] for container in containers()}
    assert images == {f"raycore:{PROJECT['version']}", f"raycore:{PROJECT['version']}-cuda"}
    assert images == set(re.findall(r"docker build -t (\S+)", DOCKERFILE))
    assert set(re.findall(r"raycore:[\w.-]+", QUICKSTART)) <= images


def test_the_image_has_what_its_pods_need():
    (user,) = re.findall(r"useradd --uid (\d+) .* (\w+)$", DOCKERFILE, re.MULTILINE)
    assert user == ("1000", "ray")
    assert {container["securityContext"]["runAsUser"] for container in containers()} == {int(user[0])}
    *_, packages = re.findall(r"apt-get install (.*?) &&", DOCKERFILE)
    assert "wget" in packages.split()


def test_variables_of_raycore_in_manifests_are_read():
    names = {entry["name"] for container in containers() for entry in container["env"]}
    source = "".join(path.read_text() for path in (ROOT / "raycore").rglob("*.py"))
    ours = {name for name in names if not name.startswith("RAY_")}
    assert ours == {"RAYCORE_API_KEY"}
    assert [name for name in ours if f'environ.get("{name}")' not in source] == []


def is_raycore_command(words: list[str]) -> bool:
    """Whether the command line takes it; argparse exits when it doesn't."""
    assert words[0] == "raycore"
    return isinstance(build_parser().parse_args(words[1:]), argparse.Namespace)


def test_commands_in_manifests_are_commands_of_raycore():
    assert is_raycore_command(shlex.split(ray_document("examples/kuberay/rayjob.yaml")["spec"]["entrypoint"]))
    commands = [line for line in commands_of(QUICKSTART) if " -- raycore " in line]
    assert len(commands) >= 3
    for line in commands:
        assert is_raycore_command(shlex.split(line.partition(" -- ")[2])), line


# ---- pods that come, serve and go


def test_the_termination_grace_period_of_a_pod_exceeds_rays_and_raycores_drains():
    drain_s = RecoveryConfig().drain_timeout_s
    for name in MANIFESTS:
        for group in groups(name):
            pod = group["template"]["spec"]
            env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
            ray_drains_s = int(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
            assert drain_s < ray_drains_s < pod["terminationGracePeriodSeconds"]
            assert "service" in name or drain_s < int(env["RAY_JOB_STOP_WAIT_TIME_S"])
    service = ray_document("examples/kuberay/rayservice.yaml")["spec"]
    (app,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    (deployment,) = app["deployments"]
    assert drain_s < deployment["graceful_shutdown_timeout_s"] < ray_drains_s
    assert pod["terminationGracePeriodSeconds"] <= service["rayClusterDeletionDelaySeconds"]


def test_shared_memory_holds_the_object_store_and_the_pod_holds_both():
    for group, pod in pods():
        (container,) = pod["containers"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
        assert volume["emptyDir"]["medium"] == "Memory"
        size = quantity(volume["emptyDir"]["sizeLimit"])
        assert int(group["rayStartParams"]["object-store-memory"]) < size
        assert size <= quantity(container["resources"]["limits"]["memory"]) / 2


def test_probes_of_pods_tolerate_a_busy_node():
    for _, pod in pods():
        (container,) = pod["containers"]
        ready, alive = container["readinessProbe"], container["livenessProbe"]
        assert (
            alive["failureThreshold"] * alive["periodSeconds"] >= 2 * ready["failureThreshold"] * ready["periodSeconds"]
        )
        assert alive["httpGet"] == {"path": "/api/healthz", "port": 52365}
        ports = {port["containerPort"] for port in container.get("ports", [])}
        assert ready["httpGet"] == alive["httpGet"] or ready["httpGet"]["port"] in ports


def test_no_rank_is_placed_on_a_head_and_gpus_are_asked_for_twice():
    for group, pod in pods():
        (container,) = pod["containers"]
        resources = container["resources"]
        if "groupName" not in group:
            assert group["rayStartParams"]["num-cpus"] == "0"
        else:
            assert resources["requests"]["cpu"] == resources["limits"]["cpu"]  # what Ray takes for the node's CPUs
        assert resources["requests"].get("nvidia.com/gpu") == resources["limits"].get("nvidia.com/gpu")
        assert container["image"].endswith("-cuda") == ("nvidia.com/gpu" in resources["limits"])


def test_an_autoscaled_cluster_never_restarts_a_node_in_its_pod():
    spec = cluster_spec("cluster.yaml")
    assert spec["enableInTreeAutoscaling"]
    assert spec["autoscalerOptions"]["version"] == "v2"
    assert {group["template"]["spec"]["restartPolicy"] for group in groups("cluster.yaml")} == {"Never"}


# ---- the quick start


def commands_of(text: str) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_files_that_commands_name_exist():
    first_line = (ROOT / "cluster.yaml").read_text().partition("\n")[0]
    assert "kubectl apply -f cluster.yaml" in first_line
    named = re.findall(r"kubectl \w+ -f (\S+\w)", "\n".join([QUICKSTART, *map(read, MANIFESTS)]))
    named += re.findall(r"(\S+\.(?:yaml|md))", first_line)
    named += re.findall(r"--working-dir (\S+)", QUICKSTART)
    assert set(named) >= {*MANIFESTS, "examples/ray_up/cluster.yaml"}
    assert [name for name in named if not (ROOT / name).exists()] == []


def read(name: str) -> str:
    return (ROOT / name).read_text()
