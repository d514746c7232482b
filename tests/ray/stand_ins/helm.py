"""Helm, which knows KubeRay's charts."""

from __future__ import annotations

import argparse

from stand_ins.world import changed_world

CHARTS = {"https://ray-project.github.io/kuberay-helm/": ("kuberay-operator", "ray-cluster", "kuberay-apiserver")}
"""By the address of their repository."""


def main() -> None:
    parser = argparse.ArgumentParser("helm", allow_abbrev=False)
    verbs = parser.add_subparsers(required=True)
    add = verbs.add_parser("repo").add_subparsers(required=True).add_parser("add")
    add.add_argument("name")
    add.add_argument("url", choices=CHARTS)
    add.set_defaults(verb=add_repository)
    command = verbs.add_parser("install")
    command.add_argument("release")
    command.add_argument("chart")
    command.set_defaults(verb=install)
    arguments = vars(parser.parse_args())
    arguments.pop("verb")(**arguments)


def add_repository(name: str, url: str) -> None:
    with changed_world() as world:
        world.helm_repositories[name] = url


def install(release: str, chart: str) -> None:
    with changed_world() as world:
        repository, _, name = chart.partition("/")
        if repository not in world.helm_repositories:
            raise SystemExit(f"Error: INSTALLATION FAILED: repo {repository} not found")
        if name not in CHARTS[world.helm_repositories[repository]]:
            raise SystemExit(f'Error: INSTALLATION FAILED: chart "{name}" not found')
        world.installed_charts.append(name)
    print(f"NAME: {release}\nSTATUS: deployed")


if __name__ == "__main__":
    main()
