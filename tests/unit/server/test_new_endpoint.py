"""An endpoint is one file and one line: here it is added to a copy of the table, in a program of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = '''
from __future__ import annotations

from pydantic import BaseModel

from raycore.server.contract.handlers import answers, runs
from raycore.server.dialects.openai.response_models import ChatAnswer
from raycore.server.protocol import Fields
from raycore.server.contract.service import Context


class EchoRequest(Fields):
    text: str


class Echo(BaseModel):
    echoed: str


class _Count:
    def __init__(self, service):
        self.number = 0


@answers(Echo, errors=(403,))
def echo(context: Context, body: EchoRequest) -> dict[str, str]:
    """Say the same again."""
    own = context.service.own(_Count)
    own.number += 1
    return {"echoed": f"{body.text} {own.number} of {context.models.find(None).name}"}
'''

LINE = '    ECHO = "POST", "/v1/echo", Rule.ADMISSION | Rule.GENERATES, "new_endpoint"\n'

PROGRAM = """
import importlib.util
import json
import sys

import raycore.server

spec = importlib.util.find_spec("raycore.server.endpoints")
table = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = table
first = "    COMPLETIONS = "
text = spec.loader.get_source(spec.name)
assert text.count(first) == 1
exec(compile(text.replace(first, sys.argv[1] + first), spec.origin, "exec"), vars(table))

from asgi_client import Client
from fake_engine import EMBEDS, FakeEngine

from raycore.server import ServerOptions, build_app

OPTIONS = ServerOptions(("fake",), api_keys=("secret",))


def asked(app, body, **headers):
    answer = Client(app, headers).post("/v1/echo", body)
    return [answer.status, answer.json]


engine = FakeEngine()
app, key = build_app(engine, OPTIONS), {"x-api-key": "secret"}
told = {
    "answers": [asked(app, {"text": text}, **key) for text in ("a", "b")],
    "a long body": asked(app, {"text": "c" * 300_000}, **key)[0],
    "without a key": asked(app, {"text": "a"}),
    "another field": asked(app, {"texts": "a"}, **key),
    "of a model that pools": asked(build_app(FakeEngine(pooling=EMBEDS), OPTIONS), {"text": "a"}, **key),
    "described": app.openapi()["paths"]["/v1/echo"]["post"],
    "metrics": Client(app, key).get("/metrics").body.decode(),
}
engine.unavailable_reason = "the engine is draining"
told["while it drains"] = asked(app, {"text": "a"}, **key)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program prints."""
    directory = tmp_path_factory.mktemp("endpoint")
    (directory / "new_endpoint.py").write_text(FILE)
    support = Path(__file__).parents[2] / "support"
    paths = os.pathsep.join(map(str, [directory, support, Path(__file__).parents[3]]))
    command = [sys.executable, "-c", PROGRAM, LINE]
    env = {**os.environ, "PYTHONPATH": paths}
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, timeout=100).stdout)


def test_it_answers_and_keeps_what_is_its_own(told):
    assert told["answers"] == [[200, {"echoed": "a 1 of fake"}], [200, {"echoed": "b 2 of fake"}]]
    assert told["a long body"] == 200


def test_all_rules_hold_for_it(told):
    assert told["without a key"][0] == 401
    assert told["while it drains"][0] == 503
    status, answer = told["of a model that pools"]
    assert (status, answer["error"]["code"]) == (404, "unsupported_endpoint")
    assert "/v1/echo" in answer["error"]["message"]


def test_a_wrong_field_is_named(told):
    status, answer = told["another field"]
    assert (status, answer["error"]["param"]) == (400, "text")


def test_it_is_described_and_counted(told):
    described = told["described"]
    assert described["description"] == "Say the same again."
    assert described["operationId"] == "echo_v1_echo_post"
    expected = {"200", "400", "401", "403", "404", "408", "413", "415", "429", "500", "503"}
    assert described["responses"].keys() == expected
    schema = described["responses"]["200"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/Echo"}
    assert 'http_requests_total{handler="/v1/echo",method="POST",status="2xx"} 3.0' in told["metrics"]
