"""An engine's metrics as values, and their exporters: Prometheus, Ray's own export, the log."""
