"""`python forked_program.py PROGRAM ARGUMENT...` has the fork server run a Python program. See `fork_server`."""

import sys

from forked_worker import request

if __name__ == "__main__":
    status = request("program", sys.argv[1:]).recv(1)
    sys.exit(status[0] if status else 1)
