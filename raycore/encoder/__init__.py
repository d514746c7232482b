"""Text encoders: networks whose tokens see tokens on both sides."""
