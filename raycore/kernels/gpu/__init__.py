"""Triton kernels for GPUs. Their modules import Triton, so import them only where it is installed."""
