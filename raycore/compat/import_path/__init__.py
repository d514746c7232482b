"""A directory for PYTHONPATH: it has the package `vllm`, which stands for `raycore.compat.vllm`."""
