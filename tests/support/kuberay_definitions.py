"""KubeRay's own definitions of its kinds, against which manifests are checked.

`kuberay_definitions.json` carries what is needed of them: the schemas of version v1, without descriptions, in which
equal parts are written once. `python tests/support/kuberay_definitions.py FOLDER` makes it of KubeRay's files, those in
`ray-operator/config/crd/bases` of github.com/ray-project/kuberay.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

CRDS = Path(os.environ.get("KUBERAY_CRDS", Path(__file__).parents[3] / "shared/kuberay"))
"""The folder of KubeRay's files, which need not exist."""
CARRIED = Path(__file__).with_name("kuberay_definitions.json")
KINDS = "RayCluster", "RayJob", "RayService"
_LEAST = 60
"""Shorter parts, in characters, are written as often as they occur."""


def mistakes(document: dict[str, Any]) -> list[str]:
    """What is wrong with a manifest of KubeRay's, one line each."""
    return [f"{error.json_path}: {error.message}" for error in _validator(document["kind"]).iter_errors(document)]


@cache
def _validator(kind: str) -> jsonschema.Draft7Validator:
    carried = json.loads(CARRIED.read_text())
    return jsonschema.Draft7Validator(_closed({**carried["kinds"][kind], "$defs": carried["$defs"]}))


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


# ---- what is carried


def carried_text(folder: Path) -> str:
    """The content of `CARRIED`, made of KubeRay's files in a folder."""
    sources, kinds = {}, {}
    for kind in KINDS:
        content = (folder / f"ray.io_{kind.lower()}s.yaml").read_bytes()
        definition = yaml.load(content, yaml.CSafeLoader)
        (version,) = [version for version in definition["spec"]["versions"] if version["name"] == "v1"]
        sources[f"ray-operator/config/crd/bases/ray.io_{kind.lower()}s.yaml"] = hashlib.sha256(content).hexdigest()
        kinds[kind] = _without_descriptions(version["schema"]["openAPIV3Schema"])
    counts: Counter[str] = Counter()
    for schema in kinds.values():
        _count(schema, counts)
    parts: dict[str, Any] = {}
    names: dict[str, str] = {}
    made = {kind: _shared(schema, counts, names, parts) for kind, schema in kinds.items()}
    lines = [
        "{",
        f'"source": {json.dumps("KubeRay, github.com/ray-project/kuberay, Apache License 2.0; SHA-256 of its files")},',
        f'"files": {json.dumps(sources, indent=1)},',
        f'"kinds": {_lines(made)},',
        f'"$defs": {_lines(parts)}',
        "}",
    ]
    return "\n".join(lines) + "\n"


def _lines(items: dict[str, Any]) -> str:
    """An object as JSON, a line for each of its items."""
    dumped = (f"{json.dumps(name)}: {json.dumps(each, separators=(',', ':'))}" for name, each in items.items())
    return "{\n" + ",\n".join(dumped) + "\n}"


def _without_descriptions(schema: Any, *, are_properties: bool = False) -> Any:
    if isinstance(schema, list):
        return [_without_descriptions(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_descriptions(value, are_properties=key == "properties" and not are_properties)
        for key, value in schema.items()
        if are_properties or key != "description"
    }


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _count(value: Any, counts: Counter[str]) -> None:
    """Count how often each schema occurs, outside of others that are counted already."""
    if _is_part(value):
        key = json.dumps(value, sort_keys=True)
        counts[key] += 1
        if counts[key] > 1:
            return
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _count(each, counts)


def _shared(value: Any, counts: Counter[str], names: dict[str, str], parts: dict[str, Any]) -> Any:
    """A schema with references to those in `parts`, which get those that occur more than once. `names`: theirs."""
    if isinstance(value, list):
        return [_shared(each, counts, names, parts) for each in value]
    if not isinstance(value, dict):
        return value
    key = json.dumps(value, sort_keys=True) if _is_part(value) else ""
    if counts[key] < 2 or len(key) < _LEAST:
        return {name: _shared(each, counts, names, parts) for name, each in value.items()}
    if key not in names:
        names[key] = f"part{len(names)}"
        parts[names[key]] = {name: _shared(each, counts, names, parts) for name, each in value.items()}
    return {"$ref": f"#/$defs/{names[key]}"}


if __name__ == "__main__":
    CARRIED.write_text(carried_text(Path(sys.argv[1])))
