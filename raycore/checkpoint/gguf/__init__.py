"""GGUF files: their headers, and what these say in the terms of Hugging Face's checkpoints. Does not import torch."""
