"""The names of pooling's requests that users import."""
