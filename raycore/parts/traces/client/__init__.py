"""Spans of requests and of ranks' starts, in the process that asks."""
