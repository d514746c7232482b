"""The classes that Ray Data's map actors run for stages that have actors of their own. Without Ray."""

from __future__ import annotations

from typing import Any, cast

from raycore.checkpoint.hub_cache import find_directory
from raycore.config import ENGINE_OPTIONS
from raycore.data.config import ProcessorConfig
from raycore.data.rows import ERROR, Row, continues, has_messages, rows_of
from raycore.data.tables import BadRow, Columns, TableStage
from raycore.errors import InvalidRequest
from raycore.parts.images.client.images import decode_image
from raycore.parts.images.client.sources import Sources
from raycore.parts.images.config import MultiModalConfig, image_background
from raycore.text.media_parts import take_images
from raycore.text.tokenizer import Tokenizer


class CpuStage(TableStage):
    """Makes or replaces one column. A row whose work fails gets its error, or ends the pipeline."""

    WRITES: str = ""
    """The column."""

    def __init__(self, config: ProcessorConfig) -> None:
        self._config = config

    def columns(self, batch: Columns, size: int) -> Columns:
        """The column, with `should_continue_on_error` also that of errors.

        Raises:
            BadRow: a row failed, and `should_continue_on_error` is False.
        """
        errors: list[str] = []
        written: list[Any] = []
        for index, row in enumerate(rows_of(batch, size)):
            error, value = row.get(ERROR) or "", row.get(self.WRITES)
            try:
                value = value if error else self.value(row, value)
            except InvalidRequest as found:
                if not self._config.should_continue_on_error:
                    raise BadRow(index, found) from found
                error = f"InvalidRequest: {found}"
            errors.append(error)
            written.append(value)
        return {self.WRITES: written, **({ERROR: errors} if self._config.should_continue_on_error else {})}

    def value(self, row: Row, before: Any) -> Any:
        """What a row gets in the column `WRITES`, where it has `before`. Raises InvalidRequest."""
        raise NotImplementedError


class PrepareMultimodal(CpuStage):
    """Replaces the URLs of images in messages by the images."""

    READS = ("messages", ERROR)
    WRITES = "messages"

    def __init__(self, config: ProcessorConfig) -> None:
        super().__init__(config)
        given = {
            name: ENGINE_OPTIONS[name].check(value)
            for name, value in config.engine_kwargs.items()
            if name in MultiModalConfig.__struct_fields__
        }
        self._images = MultiModalConfig(**given)
        self._sources = Sources(self._images)

    def value(self, row: Row, before: Any) -> Any:
        if not has_messages(row):
            return before
        return [self._prepared_message(message) for message in row["messages"]]

    def _prepared_message(self, message: Any) -> Any:
        fields = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
        content: Any = fields.get("content")
        if not isinstance(content, list):
            return cast("Any", message)
        return {**fields, "content": [self._prepared(part) for part in cast("list[Any]", content)]}

    def _prepared(self, part: Any) -> Any:
        found = take_images([{"role": "user", "content": [part]}])[1]
        if not found or found[0].kind != "url":
            return part
        background = image_background(self._images.media_io_kwargs)
        image = decode_image(self._sources.read(found[0].value), self._images.max_image_pixels, background)
        return {"type": "image_pil", "image_pil": image, **({"uuid": found[0].name} if found[0].name else {})}


class _TextStage(CpuStage):
    """Has a tokenizer."""

    def __init__(self, config: ProcessorConfig, source: str | None) -> None:
        """`source`: the tokenizer's checkpoint. None: the engine's."""
        super().__init__(config)
        name = source or config.engine_kwargs.get("tokenizer") or config.model_source
        self._tokenizer = Tokenizer.from_dir(find_directory(name, "tokenizer.json", of="model_source"))


class ChatTemplate(_TextStage):
    """Renders conversations. Those with images are left to the engine, which knows how images become prompts."""

    READS = ("messages", "prompt", ERROR)
    WRITES = "prompt"

    def __init__(self, config: ProcessorConfig) -> None:
        super().__init__(config, config.chat_template.model_source)

    def value(self, row: Row, before: Any) -> Any:
        if not has_messages(row):
            return before
        kept, images = take_images(row["messages"])
        if images:
            return None
        stage, to_continue = self._config.chat_template, continues(row["messages"])
        return self._tokenizer.apply_chat_template(
            kept,
            add_generation_prompt=not to_continue,
            continue_final_message=to_continue,
            chat_template=stage.chat_template,
            **(stage.chat_template_kwargs or {}),
        )


class Tokenize(_TextStage):
    """Encodes prompts."""

    READS = ("prompt", "messages", "tokenized_prompt", "tokenization_kwargs", ERROR)
    WRITES = "tokenized_prompt"

    def __init__(self, config: ProcessorConfig) -> None:
        super().__init__(config, config.tokenize.model_source)

    def value(self, row: Row, before: Any) -> Any:
        text = row.get("prompt")
        if not isinstance(text, str) or not text:
            return before  # the engine says what is wrong with it
        # special tokens are part of a template's text
        is_rendered = has_messages(row) and self._config.chat_template.enabled
        how = cast("dict[str, Any]", row.get("tokenization_kwargs") or {})
        return self._tokenizer.encode(text, add_special_tokens=bool(how.get("add_special_tokens", not is_rendered)))


class Detokenize(_TextStage):
    """Decodes outputs that the engine left as tokens."""

    READS = ("generated_tokens", "generated_text", ERROR)
    WRITES = "generated_text"

    def __init__(self, config: ProcessorConfig) -> None:
        super().__init__(config, config.detokenize.model_source)

    def value(self, row: Row, before: Any) -> Any:
        return self._tokenizer.decode(row["generated_tokens"]) if before is None else before
