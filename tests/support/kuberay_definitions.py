"""KubeRay's own definitions of its kinds, against which manifests are checked where these files are at hand."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

CRDS = Path(os.environ.get("KUBERAY_CRDS", Path(__file__).parents[3] / "shared/kuberay"))
"""Their folder, which need not exist."""


def mistakes(document: dict[str, Any]) -> list[str]:
    """What is wrong with a manifest of KubeRay's, one line each."""
    return [f"{error.json_path}: {error.message}" for error in _validator(document["kind"]).iter_errors(document)]


@cache
def _validator(kind: str) -> jsonschema.Draft7Validator:
    definition = yaml.load((CRDS / f"ray.io_{kind.lower()}s.yaml").read_text(), yaml.CSafeLoader)
    (version,) = [version for version in definition["spec"]["versions"] if version["name"] == "v1"]
    return jsonschema.Draft7Validator(_closed(version["schema"]["openAPIV3Schema"]))


def _closed(schema: Any) -> Any:
    """The JSON schema of an OpenAPI one, in which objects have no other properties than those that are named."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _closed(value) for key, value in schema.items() if not key.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made
