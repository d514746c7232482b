"""Decides which tokens the next step computes. The engine needs only `Scheduler`."""
