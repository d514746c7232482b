"""Prompts with images have the tokens and values that the checkpoints' own processors make."""

from __future__ import annotations

import base64
import io
import json
import shutil

import numpy as np
import pytest
import transformers
from PIL import Image
from vision_checkpoints import GEMMA3, KINDS, QWEN2_5, QWEN3, image

from raycore.config import resolve
from raycore.errors import InvalidConfig, InvalidRequest, RequestTooLarge
from raycore.parts.images.client.inputs import ImageInputs
from raycore.parts.images.client.processor import processor_class
from raycore.text.media_parts import MediaPart, take_images
from raycore.text.tokenizer import Tokenizer

QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
GEMMA_IMAGE = "<start_of_image>"


def expected(path, kind: str, text: str, images: list[Image.Image], **kwargs):
    """(token ids, values of each image or crop) that transformers makes."""
    processor = processor_class("siglip" if kind == GEMMA3 else "qwen2_5_vl").from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if kind == GEMMA3:
        both = transformers.Gemma3Processor(processor, tokenizer, image_seq_length=16)
        made = both(text=text, images=images, return_tensors="np", add_special_tokens=False, **kwargs)
        return made["input_ids"][0].tolist(), list(made["pixel_values"])
    values = [processor(images=[each], return_tensors="np", **kwargs) for each in images]
    pieces = text.split("<|image_pad|>")
    for index, each in enumerate(values):
        pieces[index] += "<|image_pad|>" * int(each["image_grid_thw"][0].prod() // 4)
    ids = tokenizer("".join(pieces), add_special_tokens=False)["input_ids"]
    return ids, [each["pixel_values"] for each in values]


def check(inputs, path, kind: str, text: str, images: list[Image.Image], **kwargs) -> None:
    ids, values = expected(path, kind, text, images, **kwargs)
    fields = {"multi_modal_data": {"image": images}, "mm_processor_kwargs": kwargs}
    made = inputs.complete("prompt 0", text, fields, adds_special_tokens=False)
    assert made.token_ids == ids
    assert len(made.data) == len(values) == len(made.features)
    for data, value in zip(made.data, values, strict=True):
        assert data.shape == list(value.shape)
        assert data.data == np.ascontiguousarray(value, np.float32).tobytes()
    token = inputs._vision.image_token_id
    positions = [f.position + offset for f in made.features for offset in range(f.num_tokens)]
    assert positions == [index for index, each in enumerate(ids) if each == token]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_values_are_those_of_the_processor(inputs, checkpoint, kind):
    made, place = inputs(kind), GEMMA_IMAGE if kind == GEMMA3 else QWEN_IMAGE
    images = [image(130, 90, 1), image(70, 220, 2), image(300, 300, 3)]
    for text in (f"What is in {place}?", f"{place}{place}\n\nAnd {place}", f"\n{place}\nDescribe\n\n{place}\n{place}"):
        check(made, checkpoint(kind), kind, text, images[: text.count(place)])


def test_crops_are_those_of_the_processor(inputs, checkpoint):
    wide = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 32}
    text = f"What is in {GEMMA_IMAGE} and {GEMMA_IMAGE}?"
    check(inputs(GEMMA3), checkpoint(GEMMA3), GEMMA3, text, [image(300, 100, 1), image(90, 100, 2)], **wide)


@pytest.mark.parametrize("kind", [QWEN2_5, QWEN3])
def test_settings_change_sizes(inputs, checkpoint, kind):
    size = {"shortest_edge": 4096, "longest_edge": 20000}
    check(inputs(kind), checkpoint(kind), kind, QWEN_IMAGE, [image(400, 300, 1)], size=size)
    fields = {"multi_modal_data": {"image": image(400, 300, 1)}}
    by_request = inputs(kind).complete("p", QWEN_IMAGE, {**fields, "mm_processor_kwargs": {"max_pixels": 20000}})
    by_engine = inputs(kind, mm_processor_kwargs={"max_pixels": 20000}).complete("p", QWEN_IMAGE, fields)
    assert by_request.data == by_engine.data
    assert by_request.features == by_engine.features
    assert by_request.features[0].num_tokens < inputs(kind).complete("p", QWEN_IMAGE, fields).features[0].num_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_have_one_placeholder_for_an_image_or_all_of_its_tokens(inputs, checkpoint, kind):
    made, tokenizer = inputs(kind), Tokenizer.from_dir(checkpoint(kind))
    text = f"What is in\n{made.placeholder}, and {made.placeholder}\n\n?"
    fields = {"multi_modal_data": {"image": [image(100, 120, 1), image(90, 60, 2)]}}
    by_text = made.complete("p", text, fields, adds_special_tokens=False)
    assert made.complete("p", tokenizer.encode(text, False), fields) == by_text
    assert made.complete("p", by_text.token_ids, fields) == by_text


def test_images_that_differ_in_anything_have_other_identifiers(inputs):
    made = inputs(QWEN2_5)

    def identifier(given, **fields) -> str:
        prompt = made.complete("p", QWEN_IMAGE, {"multi_modal_data": {"image": given}, **fields})
        return prompt.features[0].identifier

    first = image(100, 120, 1)
    changed = first.copy()
    changed.putpixel((50, 50), (1, 2, 3))
    small = {"mm_processor_kwargs": {"max_pixels": 5000}}
    identifiers = [
        *(identifier(first), identifier(changed), identifier(image(120, 100, 1)), identifier(first, **small)),
        identifier(image(100, 120, 2), multi_modal_uuids={"image": ["a"]}),
    ]
    assert len(set(identifiers)) == len(identifiers)
    assert identifier(first.copy()) == identifier(np.asarray(first)) == identifiers[0]
    assert identifier(first, multi_modal_uuids={"image": ["b"]}) == identifiers[0], "a name isn't part of an image"


def test_a_name_stands_for_an_image_only_with_the_same_reading_processing_and_salt(inputs):
    transparent = Image.new("RGBA", (90, 90), (200, 0, 0, 60))
    buffer = io.BytesIO()
    transparent.save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    fields = [
        {},
        {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
        {"mm_processor_kwargs": {"max_pixels": 5000}},
    ]

    def identifiers(made, name: str | None) -> list[str]:
        parts = [MediaPart("url", url, name) for _ in fields]
        prompts = [
            made.complete("p", QWEN_IMAGE, {"multi_modal_data": {"image": [part]}, **each})
            for part, each in zip(parts, fields, strict=True)
        ]
        return [prompt.features[0].identifier for prompt in prompts]

    expected = identifiers(inputs(QWEN2_5), None)
    assert len(set(expected)) == len(fields)
    assert identifiers(inputs(QWEN2_5), "one") == expected
    # a name of another tenant is another one
    made = inputs(QWEN2_5)
    for salt, seed in (("x", 1), ("y", 2)):
        named = {"multi_modal_uuids": {"image": ["a"]}, "cache_salt": salt}
        first = made.complete("p", QWEN_IMAGE, {"multi_modal_data": {"image": image(90, 90, seed)}, **named})
        again = made.complete("p", QWEN_IMAGE, {"multi_modal_data": {"image": [None]}, **named})
        plain = made.complete("p", QWEN_IMAGE, {"multi_modal_data": {"image": image(90, 90, seed)}})
        assert first == again == plain


def test_an_image_is_another_one_if_the_processors_files_are(inputs, checkpoint, tmp_path):
    found: set[str] = set()
    path = tmp_path / "model"
    shutil.copytree(checkpoint(QWEN2_5), path)
    settings = path / "preprocessor_config.json"
    for mean in (0.5, 0.25):
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"image_mean": [mean] * 3}))
        made = ImageInputs(resolve(str(path)), Tokenizer.from_dir(path))
        found.add(made.complete("p", QWEN_IMAGE, {"multi_modal_data": {"image": image(90, 90)}}).features[0].identifier)
    assert len(found) == 2


def test_an_image_that_comes_again_is_not_processed_again(inputs, monkeypatch):
    made, calls = inputs(QWEN2_5), []
    process = made._processor.process
    monkeypatch.setattr(made._processor, "process", lambda *given: calls.append(1) or process(*given))
    for _ in range(2):
        made.complete("p", QWEN_IMAGE, {"multi_modal_data": {"image": image(100, 120, 1)}})
    named = {"multi_modal_data": {"image": [image(90, 90, 2)]}, "multi_modal_uuids": {"image": ["b"]}}
    first = made.complete("p", QWEN_IMAGE, named)
    assert made.complete("p", QWEN_IMAGE, {**named, "multi_modal_data": {"image": [None]}}) == first
    assert len(calls) == 2
    assert (made.take_lookups(), made.take_lookups()) == ((4, 2), (0, 0))
    made.clear()
    with pytest.raises(InvalidRequest, match="p: image 0: it is None, and no image of its name"):
        made.complete("p", QWEN_IMAGE, {**named, "multi_modal_data": {"image": [None]}})
    unkept = inputs(QWEN2_5, mm_processor_cache_gb=0)
    assert unkept.complete("p", QWEN_IMAGE, named) == first
    assert not len(unkept._kept)


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_take_the_places_of_images(inputs, kind):
    made = inputs(kind, enable_mm_embeds=True)
    width, grids = made._vision.embedding_width, [[1, 4, 6], [1, 2, 2]]
    if kind == GEMMA3:
        given = np.random.default_rng(0).normal(size=(2, 16, width)).astype(np.float32)
        rows = list(given)
    else:
        given = {"image_embeds": np.ones((7, width), np.float32), "image_grid_thw": np.array(grids)}
        rows = [np.ones((6, width), np.float32), np.ones((1, width), np.float32)]
    prompt = made.complete("p", f"{made.placeholder} a {made.placeholder}", {"multi_modal_data": {"image": given}})
    assert [data.data for data in prompt.data] == [each.tobytes() for each in rows]
    assert all(data.is_embedding for data in prompt.data)
    with pytest.raises(InvalidRequest, match="enable_mm_embeds"):
        inputs(kind).complete("p", made.placeholder, {"multi_modal_data": {"image": given}})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"image_embeds": np.ones((6, 3))}, "image_grid_thw"),
        ({"image_embeds": np.ones((6, 3)), "image_grid_thw": [[1, 4, 6]]}, r"shape \(6, 3\), and the model's are"),
        ({"image_embeds": np.ones((6, 64)), "image_grid_thw": [[1, 4, 5]]}, "multiples of 2"),
        ({"image_embeds": np.ones((6, 64)), "image_grid_thw": [[1, 4]]}, "three positive integers"),
        ({"image_embeds": np.full((6, 64), np.nan), "image_grid_thw": [[1, 4, 6]]}, "finite"),
        ({"image_embeds": "AAAA", "image_grid_thw": [[1, 4, 6]]}, "npy"),
        ({"other": 1}, "image_embeds"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(inputs, given, says):
    made = inputs(QWEN2_5, enable_mm_embeds=True)
    with pytest.raises(InvalidRequest, match=f"p: image 0: .*{says}"):
        made.complete("p", QWEN_IMAGE, {"multi_modal_data": {"image": given}})


@pytest.mark.parametrize(
    ("text", "fields", "says"),
    [
        ("no place", {}, "0 placeholders for 1 images"),
        (QWEN_IMAGE * 2, {}, "2 placeholders for 1 images"),
        (QWEN_IMAGE, {"multi_modal_data": {"video": 1}}, "'video'"),
        (QWEN_IMAGE, {"multi_modal_data": {"image": "cat.png"}}, "image 0: it is str"),
        (QWEN_IMAGE, {"multi_modal_data": {"image": np.ones((4, 4, 2), np.uint8)}}, "image 0: it is an array of uint8"),
        (QWEN_IMAGE, {"multi_modal_data": {"image": image(2000, 9)}}, "one side is more than 200 times"),
        (QWEN_IMAGE, {"multi_modal_uuids": {"image": ["a", "b"]}}, "a name for each of 1 images"),
        (QWEN_IMAGE, {"mm_processor_kwargs": {"max_pixel": 1}}, "'max_pixel'"),
        (QWEN_IMAGE, {"mm_processor_kwargs": {"max_pixels": "many"}}, "max_pixels='many'"),
        (QWEN_IMAGE, {"mm_processor_kwargs": {"size": {"height": -1}}}, "size"),
        (QWEN_IMAGE, {"media_io_kwargs": {"image": {"mode": "L"}}}, "media_io_kwargs"),
        (
            QWEN_IMAGE * 3,
            {"multi_modal_data": {"image": [image(50, 50)] * 3}},
            "3 images, and limit_mm_per_prompt is 2",
        ),
    ],
)
def test_prompts_whose_images_do_not_fit_are_refused(inputs, text, fields, says):
    made = inputs(QWEN2_5, limit_mm_per_prompt={"image": 2})
    with pytest.raises(InvalidRequest, match=says):
        made.complete("prompt 0", text, {"multi_modal_data": {"image": image(50, 60)}, **fields})


def test_no_more_images_are_processed_than_a_prompt_can_have(inputs, monkeypatch):
    made, calls = inputs(QWEN2_5, max_model_len=64), []
    process = made._processor.process
    monkeypatch.setattr(made._processor, "process", lambda *given: calls.append(1) or process(*given))
    images = [image(140, 140, seed) for seed in range(9)]
    with pytest.raises(RequestTooLarge, match="image 2: with it, images have"):
        made.complete("prompt 0", QWEN_IMAGE * 9, {"multi_modal_data": {"image": images}})
    assert len(calls) == 3


def test_settings_that_are_not_known_are_refused_at_the_start(inputs):
    with pytest.raises(InvalidConfig, match="mm_processor_kwargs has 'crops'"):
        inputs(QWEN2_5, mm_processor_kwargs={"crops": 2})


def test_conversations_get_places_for_images():
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:x"}, "uuid": "n"},
        {"image_url": "http://host/b"},
    ]
    kept, found = take_images([{"role": "user", "content": parts}, {"role": "user", "content": "text"}])
    assert kept[0]["content"] == [parts[0], {"type": "image"}, {"type": "image"}]
    assert found == [
        MediaPart("url", "data:x", "n", "messages[0].content[1]"),
        MediaPart("url", "http://host/b", None, "messages[0].content[2]"),
    ]
    for kind in ("video_url", "input_audio", "file"):
        with pytest.raises(InvalidRequest, match=rf"messages\[0\].content\[0\] is of type '{kind}'"):
            take_images([{"role": "user", "content": [{"type": kind}]}])


@pytest.mark.parametrize("interleaves", [False, True])
def test_templates_that_take_only_text_get_placeholders(checkpoint, interleaves):
    tokenizer = Tokenizer.from_dir(checkpoint(QWEN2_5))
    template = "{% for message in messages %}{{ message.content + ';' }}{% endfor %}"
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}, {"type": "text", "text": "b"}]
    kept, _ = take_images([{"role": "user", "content": content}])
    text = tokenizer.apply_chat_template(
        kept, chat_template=template, image_placeholder="<P>", interleaves_images=interleaves
    )
    assert text == ("a\n<P>\nb;" if interleaves else "<P>\na\nb;")
    own = tokenizer.apply_chat_template(kept, image_placeholder="<P>", add_generation_prompt=False)
    assert own == f"<|im_start|>user\na{QWEN_IMAGE}b<|im_end|>\n"
