"""The public name of what notebook cells use: `from raycore.notebook import echo`."""

from raycore.display.notebook import echo

__all__ = ["echo"]
