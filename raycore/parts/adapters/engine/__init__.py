"""A rank's adapters: which of them have a slot, and which requests wait for one."""
