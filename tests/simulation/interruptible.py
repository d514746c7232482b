"""Importing this does what `simulation.installed` does, and lets a program be interrupted before any statement."""

from __future__ import annotations

from simulation.installation import PACKAGES, put_in_place
from simulation.world import interrupts

interrupts.everywhere([*PACKAGES, "raycore.cli", "raycore.node", "raycore.server"])
put_in_place()
