"""The workers' sides of KV connectors, as far as they know tensors."""
