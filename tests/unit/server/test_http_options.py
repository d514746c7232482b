"""Pages of other origins, further middleware, a path before the server's, and what options change in answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgi_client import Answer, Client
from fake_engine import FakeEngine
from starlette.requests import Request
from starlette.responses import Response

from raycore.cli.main import build_parser
from raycore.errors import InvalidConfig
from raycore.server.http_options import HttpOptions
from raycore.server.options import ServerOptions, server_options

PAGE = {"Origin": "https://page.example"}


class Marks:
    """Marks requests and answers."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-mark", b"class")]
            await send(message)

        await self.app(scope, receive, marked)


async def only_marked(request: Request, call_next: Any) -> Response:
    if request.headers.get("x-secret") != "open":
        return Response(status_code=418)
    answer = await call_next(request)
    answer.headers["x-order"] = answer.headers.get("x-mark", "none")
    return answer


NO_CLASS = 3


def preflight(client: Client, **headers: str) -> Answer:
    asks = {"Access-Control-Request-Method": "POST", **PAGE, **headers}
    return asyncio.run(client.call("OPTIONS", "/v1/completions", headers=asks))


def test_by_default_every_page_may_call_the_server_without_credentials(serve: Any) -> None:
    client = serve(api_keys=("k",))
    asked = preflight(client)
    assert asked.status == 200
    assert asked.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in asked.headers
    answer = client.complete(dict(PAGE))
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, "*")
    assert "access-control-allow-origin" not in client.complete({}).headers


SAFE = {"cache-control", "content-length", "content-type"}
"""What browsers show pages without being told, of the headers here."""


def test_pages_of_other_origins_can_read_what_the_headers_say(serve: Any) -> None:
    client = serve()
    answer = client.complete(dict(PAGE), no_such_field=1)
    message = asyncio.run(client.call("POST", "/v1/messages", {"messages": 5}, headers=PAGE))
    exposed = set(answer.headers["access-control-expose-headers"].split(", "))
    for each in (answer, message):
        own = {name for name in each.headers if not name.startswith("access-control-")} - SAFE - {"vary"}
        assert own
        assert own <= exposed
    assert {"x-raycore-ignored-fields", "x-request-id", "request-id", "retry-after"} == exposed


def test_pages_of_other_origins_get_what_the_options_allow(serve: Any) -> None:
    http = HttpOptions(
        allowed_origins=("https://page.example",),
        allowed_methods=("GET",),
        allowed_headers=("X-Own",),
        allow_credentials=True,
    )
    client = serve(http=http)
    answer = client.complete(dict(PAGE))
    assert answer.headers["access-control-allow-origin"] == PAGE["Origin"]
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert preflight(client).status == 400
    assert "method" in preflight(client).body.decode()
    asks = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-own"}
    assert preflight(client, **asks).status == 200
    assert preflight(client, **(asks | {"Access-Control-Request-Headers": "x-other"})).status == 400
    assert "access-control-allow-origin" not in client.complete({"Origin": "https://evil.example"}).headers
    nobody = serve(http=HttpOptions(allowed_origins=()))
    assert "access-control-allow-origin" not in nobody.complete(dict(PAGE)).headers


def test_middleware_is_a_class_or_a_function_and_the_last_one_is_outside(serve: Any) -> None:
    paths = (f"{__name__}.Marks", f"{__name__}.only_marked")
    client = serve(http=HttpOptions(middleware=paths), api_keys=("k",))
    refused = client.complete({})
    assert (refused.status, "x-request-id" in refused.headers) == (418, True)
    answer = client.complete({"x-secret": "open"})
    assert (answer.status, answer.headers["x-mark"], answer.headers["x-order"]) == (401, "class", "class")
    answer = client.complete({"x-secret": "open", "Authorization": "Bearer k"}, stream=True)
    assert (answer.status, answer.headers["x-order"]) == (200, "class")
    assert answer.events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("Marks", "isn't the path of a class or function"),
        ("a.b c", "isn't the path of a class or function"),
        ("no_such_module.Marks", r"can't be imported \(ModuleNotFoundError: "),
        (f"{__name__}.Missing", r"can't be imported \(AttributeError: "),
        (f"{__name__}.NO_CLASS", "is neither a class nor a coroutine function"),
        (f"{__name__}.preflight", "is neither a class nor a coroutine function"),
    ],
)
def test_unusable_middleware_is_refused_by_name(serve: Any, path: str, told: str) -> None:
    with pytest.raises(InvalidConfig, match=told) as raised:
        serve(http=server_options("m", {"middleware": path}).http)
    assert path.split(".")[-1] in str(raised.value)


def test_a_server_behind_a_proxy_answers_with_and_without_the_proxys_path(serve: Any) -> None:
    client = serve(http=server_options("m", {"root_path": "/api/"}).http, api_keys=("k",))
    for path in ("/health", "/api/health"):
        assert client.get(path).status == 200
    for path in ("/v1/models", "/api/v1/models"):
        assert client.get(path).status == 401
        assert asyncio.run(client.call("GET", path, headers={"Authorization": "Bearer k"})).status == 200
    described = asyncio.run(client.call("GET", "/api/docs", headers={"Authorization": "Bearer k"}))
    assert "/api/openapi.json" in described.body.decode()
    with pytest.raises(InvalidConfig, match="root_path='api' doesn't begin with /"):
        server_options("m", {"root_path": "api"})


def test_the_description_can_be_left_out(serve: Any) -> None:
    for path in ("/docs", "/openapi.json"):
        assert serve().get(path).status == 200
        assert serve(http=HttpOptions(disable_fastapi_docs=True)).get(path).status == 404


def test_usage_can_be_forced(serve: Any) -> None:
    for events in (serve(enable_force_include_usage=True).complete({}, stream=True).events,):
        assert all(event["usage"]["prompt_tokens"] > 0 for event in events)
        assert not events[-1]["choices"]
    forced = serve(enable_force_include_usage=True).chat({}, stream=True, stream_options={"include_usage": False})
    assert all(event["usage"]["total_tokens"] > 0 for event in forced.events)
    assert all("usage" not in event for event in serve().complete({}, stream=True).events)


def test_default_variables_of_the_template_give_way_to_the_requests(serve: Any, engine: FakeEngine) -> None:
    template = "{{ mood }}-{{ place }}: {% for m in messages %}{{ m.content }}{% endfor %}"
    options = {"chat_template": template, "default_chat_template_kwargs": {"mood": "calm", "place": "here"}}
    client = serve(**options)
    messages = [{"role": "user", "content": "hi"}]

    def prompt(**fields: Any) -> str:
        body = {"messages": messages, "return_token_strs": True, **fields}
        return "".join(client.post("/tokenize", body).json["token_strs"]).replace("Ġ", " ")

    assert "calm-here: hi" in prompt()
    assert "calm-there: hi" in prompt(chat_template_kwargs={"place": "there"})
    client.chat(return_token_ids=True)
    ids = client.chat({}, return_token_ids=True).json["prompt_token_ids"]
    assert "calm-here: 27 + 58?" in engine.tokenizer.decode_batch([ids])[0]
    for given, told in (("[]", "isn't a dict or a JSON object"), ({"tools": 1}, "has 'tools', which is set by")):
        with pytest.raises(InvalidConfig, match=told):
            server_options("m", {"default_chat_template_kwargs": given})


def test_tools_are_left_out_of_prompts_whose_choice_is_none_unless_the_option_is_off(serve: Any) -> None:
    template = "{{ tools | length if tools else 0 }} tools{% for m in messages %}{{ m.content }}{% endfor %}"
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

    def num_tokens(**options: Any) -> list[int]:
        client = serve(chat_template=template, **options)
        return client.chat(tools=[function], tool_choice="none", return_token_ids=True).json["prompt_token_ids"]

    assert num_tokens() != num_tokens(exclude_tools_when_tool_choice_none=False)


def test_answers_have_the_servers_role(serve: Any) -> None:
    client = serve(response_role="model")
    assert client.chat().json["choices"][0]["message"]["role"] == "model"
    assert client.chat(stream=True).events[0]["choices"][0]["delta"]["role"] == "model"


def test_the_flags_are_vllms() -> None:
    flags = ["--allowed-origins", '["https://a", "https://b"]', "--middleware", "a.B", "--middleware", "c.d"]
    flags += ["--default-chat-template-kwargs", '{"enable_thinking": false}', "--root-path", "/x"]
    args = vars(build_parser().parse_args(["serve", *flags, "--no-enable-force-include-usage", "--allow-credentials"]))
    given = {name.removeprefix("server."): value for name, value in args.items() if name.startswith("server.")}
    options: ServerOptions = server_options("m", given)
    assert options.http.allowed_origins == ("https://a", "https://b")
    assert options.http.middleware == ("a.B", "c.d")
    assert options.http.allow_credentials
    assert options.default_chat_template_kwargs == {"enable_thinking": False}
