"""Has the workers of a Ray cluster that already runs import raycore as `vllm`. Ray calls it by RAY_RUNTIME_ENV_HOOK."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

HOOK = "raycore.compat.ray_hook.with_vllm"
"""The value of the variable."""
_IMPORT_PATH = str(Path(__file__).parent / "import_path")


def with_vllm(runtime_env: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a job's runtime environment, with raycore's `vllm` on PYTHONPATH if the job may join a running cluster.

    Workers of a Ray that this program starts get its environment anyway. On other nodes, raycore must be installed in
    the same place.
    """
    from raycore.cluster.connection import address_of_last_start  # imported lazily: it imports Ray, which calls this

    if (os.environ.get("RAY_ADDRESS") or address_of_last_start() or "local") == "local":
        return runtime_env
    given = dict(runtime_env or {})
    variables: dict[str, str] = dict(given.get("env_vars") or {})
    variables["PYTHONPATH"] = os.pathsep.join([_IMPORT_PATH, variables.get("PYTHONPATH", "${PYTHONPATH}")])
    return {**given, "env_vars": variables}
