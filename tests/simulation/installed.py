"""Importing this puts the simulated world, Ray and machine in their places. Programs import it before raycore."""

from __future__ import annotations

from simulation.ray import host, modules
from simulation.world import system

system.install()
modules.install()
host.install()
