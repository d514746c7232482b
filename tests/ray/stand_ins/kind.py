"""kind, to load images into its cluster."""

from __future__ import annotations

import argparse

from stand_ins.world import changed_world


def main() -> None:
    parser = argparse.ArgumentParser("kind", allow_abbrev=False)
    load = parser.add_subparsers(required=True).add_parser("load").add_subparsers(required=True)
    command = load.add_parser("docker-image")
    command.add_argument("image")
    image = parser.parse_args().image
    with changed_world() as world:
        if image not in world.built_images:
            raise SystemExit(f'ERROR: image: "{image}" not present locally')
        world.loaded_images.append(image)


if __name__ == "__main__":
    main()
