"""Programs of a Kubernetes cluster's users, for tests that run what the quick start tells people to type."""
