"""For the process of Ray's autoscaler: the nodes that it adds, on this machine, have forked workers."""

from contextlib import ExitStack

from forked_ray import nodes_with_forked_workers
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

from raycore.cluster.local_ray.replacements import CLUSTER_PROCESSES, replaced

__all__ = ["FakeMultiNodeProvider"]

_FOR_EVER = ExitStack()
_FOR_EVER.enter_context(nodes_with_forked_workers())
_FOR_EVER.enter_context(replaced(CLUSTER_PROCESSES))
