"""Builds the native kernels. Everything else about the package is in pyproject.toml."""

import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).parent / "build_backend"))
from raycore_package import BuildKernels

setup(
    ext_modules=[
        Extension(
            "raycore.kernels._cpu",
            sources=sorted(glob("raycore/kernels/csrc/*.cpp")),
            py_limited_api=True,  # it contains no Python code: one file serves every version
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
