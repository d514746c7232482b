"""Docker, which reads a Dockerfile and builds nothing."""

from __future__ import annotations

import argparse
import re
from fnmatch import fnmatch
from pathlib import Path

from stand_ins.world import changed_world

INSTRUCTIONS = {"ARG", "FROM", "RUN", "COPY", "USER", "WORKDIR", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}


def main() -> None:
    parser = argparse.ArgumentParser("docker", allow_abbrev=False)
    command = parser.add_subparsers(required=True).add_parser("build")
    command.add_argument("-t", dest="tag", required=True)
    command.add_argument("context", type=Path)
    arguments = parser.parse_args()
    if found := mistakes(arguments.context):
        raise SystemExit("\n".join(f"ERROR: failed to solve: {mistake}" for mistake in found))
    with changed_world() as world:
        world.built_images.append(arguments.tag)


def mistakes(context: Path) -> list[str]:
    """What would keep an image from being built, as far as it can be seen without doing it."""
    text = re.sub(r"^#.*\n", "", (context / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    ignored = (context / ".dockerignore").read_text().split()
    declared: set[str] = set()
    found: list[str] = []
    for line in lines:
        instruction, _, rest = line.partition(" ")
        if instruction not in INSTRUCTIONS:
            found.append(f"unknown instruction: {instruction}")
        found += [f"{name} is not declared" for name in re.findall(r"\$\{(\w+)\}", rest) if name not in declared]
        if instruction == "ARG":
            declared.add(rest.partition("=")[0])
        if instruction == "COPY" and not rest.startswith("--from="):
            found += [f'"/{name}": not found' for name in rest.split()[:-1] if not is_there(context / name, ignored)]
    return found


def is_there(path: Path, ignored: list[str]) -> bool:
    return path.exists() and not any(fnmatch(path.name, pattern.removeprefix("**/")) for pattern in ignored)


if __name__ == "__main__":
    main()
