"""Guesses the next tokens of running requests, and decides how many guesses a step verifies."""
