"""What transfers add to the planning of steps."""
