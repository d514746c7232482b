"""How workers get other experts when the group of ranks that shares them changes."""
