"""OpenAI's client with `/v1/responses`. The engine writes given texts."""

from __future__ import annotations

import asyncio

import pytest
from openai import BadRequestError, NotFoundError
from openai.types.responses import Response
from pydantic import BaseModel
from responding import CALL, TOOL, Responder


class Number(BaseModel):
    n: int


def test_a_loop_of_tools_with_reasoning():
    responder = Responder(f"<think>I ask.</think>{CALL}", reasoning_parser="qwen3")

    async def use(client):
        items = [{"role": "user", "content": "When?"}]
        first = await client.responses.create(model="fake", input=items, tools=[TOOL])
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        Response.model_validate(first.to_dict(), strict=False)
        items += [item.to_dict() for item in first.output]
        items.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "12:00"})
        responder.engine.text = "<think>So.</think>Noon."
        second = await client.responses.create(model="fake", input=items, tools=[TOOL], store=False)
        third = await client.responses.create(
            model="fake", input=[items[-1]], previous_response_id=first.id, tools=[TOOL]
        )
        return second.output_text, third.output_text

    assert responder.with_openai(use) == ("Noon.", "Noon.")
    assert len({tuple(ids) for ids in responder.engine.asked[1:]}) == 1, "both ways lead to the same prompt"


def test_a_stream_is_put_together():
    responder = Responder(f"<think>So.</think>Seven.{CALL}", reasoning_parser="qwen3")

    async def use(client):
        text = ""
        async with client.responses.stream(model="fake", input="How many?", tools=[TOOL]) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    text += event.delta
                    assert event.snapshot == text
            return text, await stream.get_final_response()

    text, response = responder.with_openai(use)
    assert text == response.output_text == "Seven."
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output[0].content[0].text == "So."
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_a_text_is_parsed_as_a_model():
    responder = Responder('{"n": 7}')

    async def use(client):
        parsed = await client.responses.parse(model="fake", input="How many?", text_format=Number)
        async with client.responses.stream(model="fake", input="How many?", text_format=Number) as stream:
            async for _ in stream:
                pass
            return parsed, await stream.get_final_response()

    for response in responder.with_openai(use):
        assert response.output_parsed == Number(n=7)
    assert '"additionalProperties": false' in responder.engine.params[-1].structured_outputs.json


def test_stored_responses():
    responder = Responder("Seven." * 300)

    async def use(client):
        responses = client.responses
        background = await responses.create(model="fake", input="How many?", background=True)
        assert background.status == "queued"
        assert (await responses.cancel(background.id)).status == "cancelled"
        responder.engine.text = "Seven."
        response = await responses.create(model="fake", input="How many?")
        assert (await responses.retrieve(response.id)).output_text == "Seven."
        items = [item async for item in await responses.input_items.list(response.id)]
        assert [(item.role, item.content[0].text) for item in items] == [("user", "How many?")]
        await responses.delete(response.id)
        with pytest.raises(NotFoundError):
            await responses.retrieve(response.id)
        with pytest.raises(BadRequestError, match="previous_response_id"):
            await responses.create(model="fake", input="Why?", previous_response_id=response.id)

    responder.with_openai(use)


def test_a_stream_in_the_background_is_resumed():
    responder = Responder("Seven and eight.")

    async def use(client):
        asked = {"model": "fake", "input": "How many?", "background": True, "stream": True}
        begun = [event async for event in await client.responses.create(**asked)]
        response_id = begun[0].response.id
        while (await client.responses.retrieve(response_id)).status != "completed":
            await asyncio.sleep(0.01)
        resumed = await client.responses.retrieve(response_id, stream=True, starting_after=begun[4].sequence_number)
        return begun, [event async for event in resumed]

    begun, resumed = responder.with_openai(use)
    assert resumed == begun[5:]
    assert resumed[-1].response.output_text == "Seven and eight."
