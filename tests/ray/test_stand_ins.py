"""The stand-ins for a Kubernetes cluster's programs refuse what is wrong: else to run the quick start proves little."""

from __future__ import annotations

import asyncio
import importlib
import shlex
import sys

import pytest
from job_cluster import ROOT, free_ports
from stand_ins import docker
from stand_ins.kubectl import documents, forward, key
from stand_ins.world import World

CLUSTER = ROOT / "cluster.yaml"


@pytest.fixture
def world(tmp_path, monkeypatch):
    """One in which `cluster.yaml` was applied. Nothing listens where its Ray should be."""
    (port,) = free_ports(1)
    ports = {"8265": port, "8000": port}
    made = World(f"http://127.0.0.1:{port}", "a-token", ports, ports, str(tmp_path / "volumes"))
    made.built_images = made.loaded_images = ["raycore:0.1.0"]
    made.helm_repositories = {"kuberay": "https://ray-project.github.io/kuberay-helm/"}
    made.installed_charts = ["kuberay-operator"]
    made.objects = {key(document): document for document in documents(CLUSTER)}
    monkeypatch.setenv("STAND_INS", str(tmp_path / "world.json"))
    monkeypatch.chdir(ROOT)
    made.save(tmp_path / "world.json")
    return made


def run(command: str, monkeypatch, capsys) -> str:
    """What a command says when it is refused."""
    program, *arguments = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as refusal:
        importlib.import_module(f"stand_ins.{program}").main()
    assert refusal.value.code != 0
    return f"{refusal.value}{capsys.readouterr().err}"


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("docker build --tag raycore:0.1.0 .", "required: -t"),
        ("docker build -t raycore:0.1.0 . --push", "unrecognized arguments: --push"),
        ("kind load docker-image raycore:0.2.0", '"raycore:0.2.0" not present locally'),
        ("helm repo add kuberay https://ray-project.github.io/kuberay/", "invalid choice"),
        ("helm install kuberay-operator kube-ray/kuberay-operator", "repo kube-ray not found"),
        ("helm install kuberay-operator kuberay/operator", 'chart "operator" not found'),
        ("kubectl apply cluster.yaml", "required: -f"),
        ("kubectl wait --for=condition=Ready raycluster/raycore --timeout=1s", "doesn't say condition=Ready of a RayC"),
        (
            "kubectl wait --for=condition=RayClusterProvisioned raycluster/ray --timeout=1s",
            '"raycluster/ray" not found',
        ),
        ("kubectl wait --for=condition=RayClusterProvisioned raycluster/raycore", "required: --timeout"),
        ("kubectl port-forward service/raycore-head 8265", '"service/raycore-head" not found'),
        ("kubectl port-forward service/raycore-head-svc 8265 8001", "does not have a service port 8001"),
        ("kubectl get secret ray --output jsonpath={.data.auth_token}", 'secret "ray" not found'),
        ("kubectl get secret raycore --output jsonpath={.auth_token}", "is not a path in a Secret's data"),
        ("kubectl delete -f examples/kuberay/rayservice.yaml", '"rayservice/raycore-api" not found'),
    ],
)
def test_the_stand_in_for_kubectl_refuses_a_wrong_command(command, message, monkeypatch, capsys):
    assert message in run(command, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("kind: RayCluster", "kind: RayClusters", 'no matches for kind "RayClusters"'),
        ("ray.io/v1", "ray.io/v2", 'in version "ray.io/v2"'),
        ("image: raycore:0.1.0", "image: raycore:0.2.0", "ErrImagePull"),
    ],
)
def test_the_stand_in_for_kubectl_refuses_a_wrong_manifest(right, wrong, message, world, tmp_path, monkeypatch, capsys):
    text = CLUSTER.read_text()
    assert right in text
    (tmp_path / "wrong.yaml").write_text(text.replace(right, wrong, 1))
    assert message in run(f"kubectl apply -f {tmp_path}/wrong.yaml", monkeypatch, capsys)


def test_the_stand_in_for_docker_refuses_a_wrong_dockerfile(tmp_path):
    text = (ROOT / "Dockerfile").read_text()
    (tmp_path / ".dockerignore").write_text("*.egg-info\n")
    (tmp_path / "image").mkdir()
    names = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "build_backend", "raycore", "placement"]
    for name in (*names, "image/constraints.txt", "image/entrypoint.sh"):
        (tmp_path / name).touch()
    for right, wrong, message in (
        ("", "", None),
        ("COPY raycore ", "COPY rayscore ", '"/rayscore": not found'),
        ("USER ray", "USERS ray", "unknown instruction: USERS"),
        ("${RAY_VERSION}", "${RAY}", "RAY is not declared"),
    ):
        (tmp_path / "Dockerfile").write_text(text.replace(right, wrong))
        assert docker.mistakes(tmp_path) == ([message] if message else [])


def test_a_forwarded_port_on_which_no_pod_listens_ends_the_forwarding():
    local, remote = free_ports(2)

    async def ask() -> None:
        forwarding = asyncio.create_task(forward([(local, remote)]))
        while True:
            try:
                reader, _ = await asyncio.open_connection("127.0.0.1", local)
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)
        assert await reader.read() == b""
        await forwarding

    with pytest.raises(SystemExit, match="lost connection to pod"):
        asyncio.run(asyncio.wait_for(ask(), 10))
