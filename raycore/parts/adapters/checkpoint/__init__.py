"""What is read of an adapter's files."""
