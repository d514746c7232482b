"""The descriptions of what drafts, from checkpoints."""
