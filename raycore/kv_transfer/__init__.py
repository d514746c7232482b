"""The names that connectors of users import."""
