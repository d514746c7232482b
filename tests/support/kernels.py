"""Marks tests of the native kernels, which an installation without a compiler hasn't got."""

from __future__ import annotations

import pytest

from raycore.kernels import library

needs_kernels = pytest.mark.skipif(library.load() is None, reason="raycore was installed without its native kernels")
