"""Endpoints for those who run a server: what it has, how it is, and what controls the engine."""
