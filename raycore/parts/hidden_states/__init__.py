"""Final hidden states, returned with outputs."""
