"""A server's process: its sockets, connections and certificates, and what it answers until it has an engine."""
