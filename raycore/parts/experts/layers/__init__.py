"""The layers of a mixture of experts."""
