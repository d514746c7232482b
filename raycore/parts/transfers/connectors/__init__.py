"""Keys and values that live elsewhere: the interface of KV connectors, and raycore's own connectors.

Only modules in packages named `worker_side` import torch.
"""
