"""What an engine counts, as values, and the ways in which it is shown: Prometheus, Ray's own export, the log."""
