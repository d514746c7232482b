"""kubectl, for a cluster with KubeRay."""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from stand_ins.kuberay import KINDS, Operator, images, secrets, services
from stand_ins.world import World, changed_world, current_world

KUBERNETES_KINDS = {("v1", "ConfigMap"), ("v1", "PersistentVolumeClaim")}


def main() -> None:
    parser = argparse.ArgumentParser("kubectl", allow_abbrev=False)
    verbs = parser.add_subparsers(required=True)
    for verb in (apply, delete):
        command = verbs.add_parser(verb.__name__, allow_abbrev=False)
        command.add_argument("-f", dest="manifest", type=Path, required=True)
        command.set_defaults(verb=verb)
    command = verbs.add_parser("wait", allow_abbrev=False)
    command.add_argument("--for", dest="awaited", required=True)
    command.add_argument("--timeout", dest="timeout_s", type=seconds, required=True)
    command.add_argument("name")
    command.set_defaults(verb=wait)
    command = verbs.add_parser("port-forward", allow_abbrev=False)
    command.add_argument("service")
    command.add_argument("ports", nargs="+")
    command.set_defaults(verb=port_forward)
    command = verbs.add_parser("get", allow_abbrev=False)
    command.add_argument("kind", choices=["secret"])
    command.add_argument("name")
    command.add_argument("--output", required=True)
    command.set_defaults(verb=get)
    arguments = vars(parser.parse_args())
    arguments.pop("verb")(**arguments)


def apply(manifest: Path) -> None:
    with changed_world() as world:
        for document in documents(manifest):
            check(document, world)
            world.objects[key(document)] = document
            Operator(world).start(document)
            print(f"{key(document)} created")


def check(document: dict[str, Any], world: World) -> None:
    """Exit if a cluster wouldn't take it, or couldn't start its pods."""
    version, kind = document["apiVersion"], document["kind"]
    if (version, kind) in KUBERNETES_KINDS:
        return
    if (version, kind) not in KINDS or "kuberay-operator" not in world.installed_charts:
        raise SystemExit(f'error: no matches for kind "{kind}" in version "{version}"')
    # takes longer to import than all the rest
    from kuberay_definitions import mistakes

    if found := mistakes(document):
        raise SystemExit("\n".join(found))
    if missing := images(document) - set(world.loaded_images):
        raise SystemExit(f"the cluster has no image {missing}: ErrImagePull")


def delete(manifest: Path) -> None:
    with changed_world() as world:
        for document in documents(manifest):
            if world.objects.pop(key(document), None) is None:
                raise SystemExit(f'Error from server (NotFound): "{key(document)}" not found')
            Operator(world).end(document)
            print(f'"{key(document)}" deleted')


def wait(awaited: str, timeout_s: float, name: str) -> None:
    world = current_world()
    if name not in world.objects:
        raise SystemExit(f'Error from server (NotFound): "{name}" not found')
    operator = Operator(world)
    deadline_s = time.monotonic() + timeout_s
    while not operator.has_come(world.objects[name], awaited):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"error: timed out waiting for {awaited} on {name}")
        time.sleep(0.2)


def get(kind: str, name: str, output: str) -> None:
    if name not in (found := secrets(current_world())):
        raise SystemExit(f'Error from server (NotFound): {kind} "{name}" not found')
    if (path := re.fullmatch(r"jsonpath=\{\.data\.(\w+)\}", output)) is None:
        raise SystemExit(f"error: --output {output} is not a path in a Secret's data")
    print(found[name].get(path[1], ""), end="")


def port_forward(service: str, ports: Sequence[str]) -> None:
    world = current_world()
    kind, _, name = service.partition("/")
    if kind != "service" or name not in (found := services(world)):
        raise SystemExit(f'Error from server (NotFound): "{service}" not found')
    pairs: list[tuple[int, int]] = []
    for port in ports:
        local, _, remote = port.rpartition(":")
        if int(remote) not in found[name]:
            raise SystemExit(f"error: Service {name} does not have a service port {remote}")
        pairs.append((world.local_ports[local or remote], world.pod_ports[remote]))
    asyncio.run(forward(pairs))


async def forward(pairs: Sequence[tuple[int, int]]) -> None:
    """Forward local ports until one is asked for on which no pod listens: kubectl, too, gives up all of them then."""
    lost = asyncio.Event()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        try:
            pod_reader, pod_writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            lost.set()
            writer.close()
            return
        await asyncio.gather(copy(reader, pod_writer), copy(pod_reader, writer))

    servers = [
        await asyncio.start_server(lambda reader, writer, port=remote: join(reader, writer, port), "127.0.0.1", local)
        for local, remote in pairs
    ]
    await lost.wait()
    for server in servers:
        server.close()
    raise SystemExit("error: lost connection to pod")


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # one of the two has gone, and the other one is told so
    finally:
        writer.close()


def documents(manifest: Path) -> list[dict[str, Any]]:
    return list(yaml.load_all(manifest.read_text(), yaml.CSafeLoader))


def key(document: dict[str, Any]) -> str:
    return f"{document['kind'].lower()}/{document['metadata']['name']}"


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


if __name__ == "__main__":
    main()
