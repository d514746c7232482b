"""The page that compares raycore's names with vLLM's. `docs/write_compatibility.py` writes it."""
