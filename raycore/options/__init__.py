"""How options are declared: once, at a field, from which flags, checks and the documentation follow."""
