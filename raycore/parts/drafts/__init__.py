"""Speculative decoding: guesses of next tokens, of which one step verifies several."""
