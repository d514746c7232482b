"""A server on one of several simulated nodes of this machine: `raycore serve`, connected to the node that is named.

python tests/chaos/server_on_node.py CLUSTER NODE_IP FLAG...
"""

from __future__ import annotations

import logging
import sys

import ray

from raycore.cli.main import main

if __name__ == "__main__":
    ray.init(sys.argv[1], _node_ip_address=sys.argv[2], logging_level=logging.ERROR, log_to_driver=False)
    sys.exit(main(["serve", *sys.argv[3:]]))
