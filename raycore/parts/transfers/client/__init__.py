"""The client's side of transfers."""
