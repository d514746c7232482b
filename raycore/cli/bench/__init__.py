"""`raycore bench`: measures a running server, or an engine in this process. Flags, metrics and results are vLLM's."""
