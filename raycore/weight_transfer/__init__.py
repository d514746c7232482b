"""The names that trainers import."""
