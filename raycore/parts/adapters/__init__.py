"""LoRA adapters: small sets of weights that requests add to the model's."""
