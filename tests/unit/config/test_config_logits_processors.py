"""Which values the option `logits_processors` takes, and how the classes reach other processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from configs import make_config

from raycore.client.request_checks import validate, validators
from raycore.config import EngineConfig, resolve
from raycore.config.logits_processors import processor_classes
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig, InvalidRequest
from raycore.sampling.logits_processors import AdapterLogitsProcessor
from raycore.sampling_params import SamplingParams

ADAPTER = "raycore.sampling.logits_processors:AdapterLogitsProcessor"


class Doubles(AdapterLogitsProcessor):
    """A processor that other processes can import, if they know this module."""

    factor = 2

    @classmethod
    def validate_params(cls, sampling_params):
        if (sampling_params.extra_args or {}).get("factor") == 3:
            raise ValueError("factor=3 isn't 2")

    def is_argmax_invariant(self):
        return True

    def new_req_logits_processor(self, params):
        return lambda output_ids, logits: logits * self.factor


def resolved(*given, **options) -> EngineConfig:
    return resolve(demo_model_path(), logits_processors=list(given), **options)


def test_classes_and_both_forms_of_paths_are_taken():
    config = resolved(Doubles, ADAPTER, ADAPTER.replace(":", "."), f"{__name__}:Doubles")
    classes = processor_classes(config.plugins, EngineConfig.decode(config.encode()).logits_processors)
    assert classes == [Doubles, AdapterLogitsProcessor, AdapterLogitsProcessor, Doubles]
    assert resolve(demo_model_path(), logits_processors=None).logits_processors == ()
    assert not make_config().has_logits_processors


def test_a_class_that_others_cannot_import_is_sent_along():
    class Local(Doubles):
        factor = 5

    (sent,) = EngineConfig.decode(resolved(Local).encode()).logits_processors
    assert repr(sent).endswith("<locals>.Local")
    program = "import sys, pickle; found = pickle.loads(sys.stdin.buffer.read()); print(found.__name__, found.factor)"
    known = f"import sys; sys.path[:] = {sys.path!r}; "
    result = subprocess.run(
        [sys.executable, "-c", known + program], input=sent.pickled, capture_output=True, timeout=60, check=True
    )
    assert result.stdout.split() == [b"Local", b"5"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nothing.like:This", "'nothing.like:This' can't be imported .ModuleNotFoundError"),
        (f"{ADAPTER}s", "can't be imported .AttributeError"),
        ("Doubles", "it names no module and class"),
        (3, "3 isn't a class"),
        (dict, "<class 'dict'> has no method apply"),
        ("raycore.errors:InvalidConfig", "raycore.errors:InvalidConfig has no method apply"),
    ],
)
def test_what_is_no_processor_is_refused_by_name(given, message):
    with pytest.raises(InvalidConfig, match=f"logits_processors: .*{message}"):
        resolved(given)


def test_processors_and_speculation_exclude_each_other():
    with pytest.raises(InvalidConfig, match="logits_processors can't be used with speculative_config"):
        resolved(ADAPTER, speculative_config={"method": "ngram", "num_speculative_tokens": 2})


def test_processors_check_the_parameters_of_requests():
    checks = validators(resolved(Doubles))
    validate(checks, SamplingParams(extra_args={"factor": 2}))
    with pytest.raises(InvalidRequest, match="the logits processor Doubles refuses the request: factor=3 isn't 2"):
        validate(checks, SamplingParams(extra_args={"factor": 3}))
    assert validators(make_config()) == []
