"""Stages with actors of their own do what the engine's process does, with the same options."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from raycore.data.config import ProcessorConfig
from raycore.data.stages import PrepareMultimodal, Tokenize
from raycore.data.tables import BadRow
from raycore.demo import demo_model_path
from raycore.text.tokenizer import Tokenizer

BLUE = [0, 0, 255]


def config(**fields: Any) -> ProcessorConfig:
    return ProcessorConfig(model_source=demo_model_path(), **fields)


def transparent_url() -> str:
    file = BytesIO()
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def asked(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}, "uuid": "mine"}]}]


@pytest.mark.parametrize(
    ("options", "color"),
    [({}, (255, 255, 255)), ({"media_io_kwargs": {"image": {"rgba_background_color": BLUE}}}, (0, 0, 255))],
)
def test_images_are_read_with_the_engines_settings(options: dict[str, Any], color: tuple[int, ...]) -> None:
    stage = PrepareMultimodal(config(engine_kwargs=options))
    (messages,) = stage.columns({"messages": [asked(transparent_url())]}, 1)["messages"]
    (part,) = messages[0]["content"]
    assert part["image_pil"].getpixel((0, 0)) == color
    assert part["uuid"] == "mine"


def test_a_bad_image_is_an_error_of_its_row() -> None:
    rows: dict[str, list[Any]] = {"messages": [asked(transparent_url()), asked("data:image/png;base64,AAAA")]}
    with pytest.raises(BadRow) as caught:
        PrepareMultimodal(config()).columns(rows, 2)
    assert caught.value.index == 1
    goes_on = PrepareMultimodal(config(should_continue_on_error=True)).columns(rows, 2)
    assert [bool(each) for each in goes_on["__inference_error__"]] == [False, True]


@pytest.mark.parametrize("adds", [None, True, False])
def test_special_tokens_are_added_as_the_row_asks(adds: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        asked.append(add_special_tokens)
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    stage = Tokenize(config())
    stage.columns(
        {"prompt": ["27 +"], "tokenization_kwargs": [{} if adds is None else {"add_special_tokens": adds}]}, 1
    )
    assert asked == [adds is not False]
