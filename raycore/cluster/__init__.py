"""Starts ranks, watches them, replaces them, stops them."""

import ray

from raycore.node.versions import warn_if_untested

# before the modules of this package import what another Ray may lack
warn_if_untested("Ray", ray.__version__)
