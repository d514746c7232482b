"""The options of speculative decoding, and what they become."""
