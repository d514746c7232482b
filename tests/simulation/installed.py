"""Importing this puts the simulated world, Ray and machine in their places. Programs import it before raycore."""

from __future__ import annotations

from simulation.installation import put_in_place

put_in_place()
