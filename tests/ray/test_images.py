"""Images through the front doors: Python's, and HTTP with OpenAI's client. Tokens are transformers' own."""

from __future__ import annotations

import asyncio
import base64
import io

import numpy as np
import pytest
from image_prompts import GREEDY, NUM_TOKENS, make_case
from openai_servers import raycore_server
from PIL import Image
from vision_checkpoints import IMAGE, QWEN2_5, image

from raycore import LLM, AsyncLLM
from raycore.errors import InvalidRequest

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
TEXT = f"What is in this image? {IMAGE} Describe it.".replace(IMAGE, PLACE)
WHAT = {"type": "input_text", "text": "What is this?"}
OPTIONS = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(QWEN2_5, tmp_path_factory.mktemp("images"))


def prompt(given, **fields):
    return {"prompt": TEXT, "multi_modal_data": {"image": given}, **fields}


def url_of(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture_part(seed: int) -> dict[str, str]:
    return {"type": "input_image", "image_url": url_of(image(120, 90, seed))}


def tokens(outputs) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in outputs]


def test_each_form_of_an_image_gives_the_same_tokens_and_caches_can_be_dropped(ray_cluster, case):
    first, second = image(120, 90), image(120, 90, 1)
    named = {"multi_modal_uuids": {"image": ["second"]}}
    with LLM(str(case.path), enable_mm_embeds=True, **OPTIONS) as llm:
        prompts = [prompt(first), prompt([np.asarray(second)]), prompt(second, **named), prompt([None], **named)]
        expected = [case.expected[0], *[case.expected[1]] * 3]
        assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
        llm.reset_mm_cache()
        llm.reset_encoder_cache()
        assert llm.reset_prefix_cache()
        assert tokens(llm.generate(prompts[:3], GREEDY, use_tqdm=False)) == expected[:3]
        # what the client takes for sent is asked for again
        assert llm._client.utility("reset_mm_cache", ()) == [None]
        assert llm.reset_prefix_cache()
        assert tokens(llm.generate(prompts[:2], GREEDY, use_tqdm=False)) == expected[:2]
        content = [{"type": "image_pil", "image_pil": first}, {"type": "text", "text": "What?"}]
        (chat,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
        assert len(chat.outputs[0].token_ids) == NUM_TOKENS
        embeddings = {"image_embeds": np.zeros((4, 64), np.float32), "image_grid_thw": [[1, 4, 4]]}
        (zeros,) = llm.generate(prompt(embeddings), GREEDY, use_tqdm=False)
        assert tokens([zeros]) != [case.expected[0]]
        with pytest.raises(InvalidRequest, match="prompt 1: the prompt has 1 placeholders for 2 images"):
            llm.generate([prompt(first), prompt([first, second])], GREEDY, use_tqdm=False)


def test_openais_client_sends_images(ray_cluster, case):
    async def ask() -> None:
        async with await AsyncLLM.create(str(case.path), **OPTIONS) as engine:
            with raycore_server(engine) as api:
                await asyncio.to_thread(chat, api)

    def chat(api) -> None:
        (usage, with_image), (other_usage, other) = (say(api, image(120, 90, seed)) for seed in (0, 1))
        assert usage.prompt_tokens == other_usage.prompt_tokens > 20
        assert with_image != other
        assert say(api, image(120, 90))[1] == with_image
        first = respond(api, [picture_part(0), WHAT])
        assert (first.usage.input_tokens, first.output_text) == (usage.prompt_tokens, with_image)
        # the stored image is part of the next prompt
        again = respond(api, "And now?", previous_response_id=first.id)
        later = [{"role": "assistant", "content": with_image}, {"role": "user", "content": "And now?"}]
        usage, expected = say(api, image(120, 90), *later)
        assert (again.usage.input_tokens, again.output_text) == (usage.prompt_tokens, expected)
        other_again = respond(api, "And now?", previous_response_id=respond(api, [picture_part(1), WHAT]).id)
        assert other_again.output_text != expected

    def say(api, picture: Image.Image, *later: dict[str, str]):
        content = [{"type": "image_url", "image_url": {"url": url_of(picture)}}, {"type": "text", "text": WHAT["text"]}]
        messages = [{"role": "user", "content": content}, *later]
        answer = api.client.chat.completions.create(
            model=api.model, messages=messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        return answer.usage, answer.choices[0].message.content

    def respond(api, content, **fields):
        return api.client.responses.create(
            model=api.model,
            input=[{"role": "user", "content": content}],
            max_output_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
            **fields,
        )

    asyncio.run(ask())
