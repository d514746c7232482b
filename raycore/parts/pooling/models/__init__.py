"""What a checkpoint says of pooling."""
