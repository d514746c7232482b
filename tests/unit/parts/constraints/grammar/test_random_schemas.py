"""Random schemas on the way of a request: see `benchmarks/constraints.py`, of which this is a short run."""

from __future__ import annotations

import collections
from itertools import islice

from fuzz import constraints
from fuzz.schemas import own_schemas


def test_every_output_of_an_accepted_schema_is_valid(monkeypatch):
    monkeypatch.setattr(constraints, "schemas", lambda count, seed: islice(own_schemas(seed), count))
    outcomes = constraints.run(150, seed=11)
    assert [outcome for outcome in outcomes if outcome.kind in constraints.FAILURES] == []
    counts = collections.Counter(outcome.kind for outcome in outcomes)
    assert counts["accepted"] > 50
    assert counts["refused"] > 20
    assert sum(outcome.num_outputs for outcome in outcomes) > 200


def test_the_check_of_random_schemas_finds_an_invalid_output():
    validate = constraints.validator('{"type": "string", "format": "date", "pattern": "^2"}')
    assert validate('"2024-02-29"') is None
    assert "is not a 'date'" in validate('"2023-02-29"')
    assert "does not match" in validate('"1999-01-01"')
    assert "not JSON" in validate('"')
