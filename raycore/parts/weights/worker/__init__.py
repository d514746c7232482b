"""What a worker does to take, exchange and give away weights."""
