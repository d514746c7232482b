"""Engines that are disturbed while requests run: by faults, and by pauses and sleeps."""
