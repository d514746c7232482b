"""What requests and responses have in common, whatever the endpoint: bodies, streams, errors, ids, JSON."""
