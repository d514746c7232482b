"""The weights of heads that draft, on one tensor-parallel rank."""
