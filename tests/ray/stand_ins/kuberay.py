"""KubeRay's operator, with a Ray of this machine in the place of those of its pods."""

from __future__ import annotations

import base64
import json
import shlex
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import yaml

from stand_ins.world import World

KINDS = {("ray.io/v1", "RayCluster"), ("ray.io/v1", "RayJob"), ("ray.io/v1", "RayService")}
API_PORT = "8000"
"""Where pods serve OpenAI's API, whether Ray Serve does it or a job."""


def cluster_spec(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec


def images(document: dict[str, Any]) -> set[str]:
    """Those of the pods that a manifest starts at once."""
    spec = cluster_spec(document)
    groups = [spec["headGroupSpec"], *(group for group in spec["workerGroupSpecs"] if group["replicas"])]
    return {container["image"] for group in groups for container in group["template"]["spec"]["containers"]}


def services(world: World) -> dict[str, set[int]]:
    """The ports of the Services that KubeRay makes, by name."""
    made: dict[str, set[int]] = {}
    for document in world.objects.values():
        if document["kind"] not in ("RayCluster", "RayService"):
            continue
        head, *_ = cluster_spec(document)["headGroupSpec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in head["ports"]}
        name = document["metadata"]["name"]
        made[f"{name}-head-svc"] = set(ports.values())
        if document["kind"] == "RayService":
            made[f"{name}-serve-svc"] = {ports["serve"]}
    return made


def secrets(world: World) -> dict[str, dict[str, str]]:
    """What is in the Secrets that KubeRay makes, by name."""
    token = base64.b64encode(world.token.encode()).decode()
    return {
        document["metadata"]["name"]: {"auth_token": token}
        for document in world.objects.values()
        if document["kind"] == "RayCluster" and document["spec"].get("authOptions", {}).get("mode") == "token"
    }


class Operator:
    def __init__(self, world: World) -> None:
        self._world = world

    def start(self, document: dict[str, Any]) -> None:
        """What follows when a manifest is applied."""
        if document["kind"] == "RayService":
            config = yaml.safe_load(document["spec"]["serveConfigV2"])
            config["http_options"] = {"host": "127.0.0.1", "port": self._world.pod_ports[API_PORT]}
            self._ask("PUT", "/api/serve/applications/", config)
        if document["kind"] == "RayJob":
            body = {"entrypoint": self._entrypoint(document), "submission_id": document["metadata"]["name"]}
            self._ask("POST", "/api/jobs/", body)

    def has_come(self, document: dict[str, Any], awaited: str) -> bool:
        """Whether an object is as it is awaited. Exits if KubeRay never says that, or if it can't come any more."""
        match document["kind"], awaited:
            case "RayCluster", "condition=RayClusterProvisioned" | "condition=HeadPodReady":
                return bool(self._ask("GET", "/api/version")["ray_version"])
            case "RayService", "condition=Ready":
                applications = self._ask("GET", "/api/serve/applications/")["applications"]
                states = {application["status"] for application in applications.values()}
                if "DEPLOY_FAILED" in states:
                    raise SystemExit(f"the service can't be deployed: {applications}")
                return states == {"RUNNING"}
            case "RayJob", "jsonpath={.status.jobStatus}=SUCCEEDED":
                job = f"/api/jobs/{document['metadata']['name']}"
                status = self._ask("GET", job)["status"]
                if status in ("FAILED", "STOPPED"):
                    raise SystemExit(f"the job is {status}\n{self._ask('GET', f'{job}/logs')['logs']}")
                return status == "SUCCEEDED"
            case kind, _:
                raise SystemExit(f"KubeRay doesn't say {awaited} of a {kind}")

    def end(self, document: dict[str, Any]) -> None:
        """What follows when a manifest is deleted."""
        if document["kind"] == "RayService":
            self._ask("DELETE", "/api/serve/applications/")
        if document["kind"] == "RayJob":
            self._ask("DELETE", f"/api/jobs/{document['metadata']['name']}")

    def _entrypoint(self, document: dict[str, Any]) -> str:
        """A job's command, with the paths on this machine of the volumes that the head's pod mounts."""
        pod = cluster_spec(document)["headGroupSpec"]["template"]["spec"]
        folders = {volume["name"]: self._folder(volume) for volume in pod["volumes"]}
        words = shlex.split(document["spec"]["entrypoint"])
        for mount in pod["containers"][0]["volumeMounts"]:
            if folder := folders[mount["name"]]:
                words = [
                    word.replace(mount["mountPath"], str(folder), 1) if word.startswith(mount["mountPath"]) else word
                    for word in words
                ]
        return shlex.join(words)

    def _folder(self, volume: dict[str, Any]) -> Path | None:
        """Where a volume's files are, or None for memory."""
        match volume:
            case {"configMap": {"name": name}}:
                files = self._object("configmap", name)["data"]
            case {"persistentVolumeClaim": {"claimName": name}}:
                self._object("persistentvolumeclaim", name)
                files = {}
            case _:
                return None
        folder = Path(self._world.volumes) / name
        folder.mkdir(parents=True)
        (folder / "..data").mkdir()
        for file, text in files.items():
            (folder / "..data" / file).write_text(text)
            (folder / file).symlink_to(Path("..data") / file)  # as Kubernetes has them
        return folder

    def _object(self, kind: str, name: str) -> dict[str, Any]:
        if (found := self._world.objects.get(f"{kind}/{name}")) is None:
            raise SystemExit(f'a pod can\'t start: {kind} "{name}" not found')
        return found

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """What Ray answers. urllib does it because a command that is run ten times has to start at once."""
        headers = {"Authorization": f"Bearer {self._world.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._world.dashboard + path, data, headers, method=method)
        try:
            with urlopen(request, timeout=60) as response:
                answer = response.read()
        except HTTPError as error:
            raise SystemExit(f"Ray says {error.code} to {method} {path}: {error.read().decode()}") from error
        return json.loads(answer) if answer else None
