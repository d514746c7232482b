"""The name under which hidden states are reported."""

from __future__ import annotations

NAME = "hidden_states"
"""Reports have float32[D] for each token: the final hidden state that the next token comes from."""
