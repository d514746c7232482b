"""OpenTelemetry traces of requests, and of the starts of ranks."""
