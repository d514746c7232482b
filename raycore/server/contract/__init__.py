"""What an endpoint is: a handler, what it gets, its route, or why the server refuses it."""
