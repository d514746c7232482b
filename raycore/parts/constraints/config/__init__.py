"""The options of constraints and of reasoning."""
