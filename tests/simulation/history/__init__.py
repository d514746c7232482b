"""Puts faults that this project has had back into a copy of its sources, and has seeds look for them."""
