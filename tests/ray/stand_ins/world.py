"""A Kubernetes cluster as far as the quick start sees it.

`kubectl.py`, `helm.py`, `kind.py` and `docker.py` stand for the programs of these names. Each call is a process of its
own, so what they have to know of one another's work is in a file, which `STAND_INS` in the environment names. They
refuse what the programs would refuse, and flags that the quick start doesn't use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class World:
    dashboard: str
    """The address of the dashboard of a Ray of this machine, which stands for that of every pod."""
    token: str
    """What that Ray asks its clients for."""
    pod_ports: dict[str, int]
    """Where the ports of pods are on this machine."""
    local_ports: dict[str, int]
    """What to listen on in the place of the ports that the quick start names."""
    volumes: str
    """A folder with a folder for each volume."""

    built_images: list[str] = field(default_factory=list)
    loaded_images: list[str] = field(default_factory=list)
    helm_repositories: dict[str, str] = field(default_factory=dict)
    """Addresses by name."""
    installed_charts: list[str] = field(default_factory=list)
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What was applied, by `kind/name`."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def current_world() -> World:
    return World(**json.loads(_path().read_text()))


@contextmanager
def changed_world() -> Generator[World, None, None]:
    """The world, kept as it is left unless an error is."""
    world = current_world()
    yield world
    world.save(_path())


def _path() -> Path:
    return Path(os.environ["STAND_INS"])
