"""Runs programs that import vLLM on raycore.

`python -m raycore.compat.vllm script.py` runs a script in which `vllm` means `raycore.compat.vllm`. That package has
vLLM's names at vLLM's places. Almost all of them are raycore's own objects: `names` says which.
"""
