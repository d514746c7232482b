"""What the raylet of a test starts, under this name, in front of a worker that has a runtime environment."""

import sys

from forked_worker import request

if __name__ == "__main__":
    # behind Python's own flags and the worker's path
    request("worker", sys.argv[1 + next(i for i, each in enumerate(sys.argv) if each.endswith("forked_worker.py")) :])
