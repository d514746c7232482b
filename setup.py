"""Builds the native kernels. Everything else about the package is in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

SOURCES = "raycore/kernels/csrc"

setup(
    ext_modules=[
        Extension(
            "raycore.kernels._cpu",
            sources=sorted(glob(f"{SOURCES}/*.cpp")),
            depends=sorted(glob(f"{SOURCES}/*.h")),
            language="c++",
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-ffp-contract=fast",  # also where the compiler's default is another: results have the same bits
                "-fvisibility=hidden",
                "-Wno-maybe-uninitialized",  # false alarms in GCC's own headers
            ],
            py_limited_api=True,  # it contains no Python code: one file serves every version
            optional=True,  # without a compiler, plain torch computes
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
