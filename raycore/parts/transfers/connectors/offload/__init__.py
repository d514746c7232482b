"""Blocks of the prefix cache that are kept in the host's memory and in files."""
