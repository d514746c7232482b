"""Helpers for notebooks: `from raycore.notebook import echo`."""

from raycore.display.notebook import echo

__all__ = ["echo"]
