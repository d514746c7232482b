"""The driver's side: its part in the rounds of ranks, and the actor that coordinates all servers."""
