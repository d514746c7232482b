"""Ranks that step together: in which steps they meet, and who shares experts with whom."""
