"""Weight updates of a whole engine, and requests for them."""
