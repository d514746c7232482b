"""Whether a server's answers are those that its OpenAPI document describes: schemathesis, for one operation at a time.

Its plugin for pytest makes up the cases of all operations when tests are collected, which takes ten CPU seconds in each
process of a run. Here a test makes those of its operation.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from schemathesis.schemas import BaseSchema

NUM_EXAMPLES = int(os.environ.get("RAYCORE_OPENAPI_EXAMPLES", "4"))
"""Made up at random for each path of the OpenAPI document, besides those that go through its fields one by one. With
250 there are about 2,500 cases."""


def operations_of(document: dict[str, Any]) -> list[str]:
    """Its operations, such as `POST /v1/completions`."""
    return [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]


def check_operation(document: dict[str, Any], operation: str, app: Any) -> None:
    """Check the answers of `app` to the requests that schemathesis makes up for an operation of its `document`."""
    import schemathesis
    from schemathesis.checks import load_all_checks
    from schemathesis.generation.feedback import NO_FEEDBACK
    from schemathesis.pytest._test_builder import build_operation_test
    from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

    load_all_checks()
    method, path = operation.split(" ")
    schema: BaseSchema = schemathesis.openapi.from_dict(document).include(method=method, path=path)
    (found,) = schema.get_all_operations()

    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def answers_conform(case: Any) -> None:
        # a document can't say all that the engine refuses, and needn't say that numbers may be text
        case.call_and_validate(app=app, excluded_checks=[positive_data_acceptance, negative_data_rejection])

    build_operation_test(
        config=schema.config, operation=found.ok(), test_func=answers_conform, given_kwargs={}, feedback=NO_FEEDBACK
    )()
