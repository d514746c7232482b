"""How a trainer's weights come to workers: by Ray's object store, shared memory, torch.distributed, or files."""
