"""Decides which tokens the next step computes. `Scheduler` is the entry point."""
