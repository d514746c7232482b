"""Images before the workers' step: they are fetched, decoded, processed, and find their places in prompts.

Nothing here is imported by engines whose models take only text.
"""
