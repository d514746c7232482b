"""The options of transfers."""
