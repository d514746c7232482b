"""Starts and ends a Ray of this program's own, without what only clusters need, and shielded from its signals.

`replacements` has the table of Ray's functions that are replaced meanwhile, with reasons.
"""
