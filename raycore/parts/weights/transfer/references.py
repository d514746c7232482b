"""References to Ray's objects in messages that Ray doesn't carry.

Pickled outside of Ray's own messages, a reference would keep its object for as long as the process lives. So the
sender keeps the reference, and sends what another process needs to make one of its own.
"""

from __future__ import annotations

# Ray is partially typed, and has no public function for this:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false, reportPrivateImportUsage=false
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import ray

from raycore.errors import InvalidInput

_LENT = "object_ref"


@contextmanager
def lent(value: Any) -> Generator[Any]:
    """Yield `value` with plain data instead of Ray's references in its dicts, lists and tuples.

    The references stay valid in other processes during the `with` block.
    """
    yield _without_refs(value)


def is_lent(value: object) -> bool:
    """Whether this is what `lent` puts in the place of a reference."""
    return isinstance(value, dict) and _LENT in value


def fetch(value: object, timeout_s: float) -> Any:
    """Return the object of a reference, or of what `lent` has made of one. Its buffers are those of the object store.

    Raises:
        InvalidInput: it is neither, or the object is lost, or doesn't come in time.
    """
    if not isinstance(value, ray.ObjectRef):
        if not is_lent(value):
            raise InvalidInput(f"refs has a {type(value).__name__}: expected references to Ray's objects")
        binary, owner, status = cast("dict[str, Any]", value)[_LENT]
        value = ray.ObjectRef(binary, owner)
        _core_worker().deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, status)
    try:
        return ray.get(value, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise InvalidInput(f"an object with weights didn't come within {timeout_s:g} s") from None
    except ray.exceptions.RayError as error:
        raise InvalidInput(f"an object with weights can't be read: {type(error).__name__}: {error}") from error


def put(value: object) -> Any:
    """Put a value into the object store. Returns a reference, as long as which it stays there."""
    return ray.put(value)


def lent_reference(ref: Any) -> dict[str, Any]:
    """Return plain data for a reference that this process keeps."""
    _, owner, status = _core_worker().serialize_object_ref(ref)
    return {_LENT: (ref.binary(), owner, status)}


def _without_refs(value: Any) -> Any:
    if isinstance(value, ray.ObjectRef):
        return lent_reference(value)
    if isinstance(value, dict):
        return {key: _without_refs(each) for key, each in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_without_refs(each) for each in cast("list[Any]", value)]
    return value


def _core_worker() -> Any:
    return ray._private.worker.global_worker.core_worker
