"""Separates a model's reasoning from its content, with a parser for each family of models. Pure.

The parsers are named like the corresponding values of vLLM's `--reasoning-parser`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from raycore.errors import InvalidConfig
from raycore.plugins import REASONING_PARSERS, find_plugin, plugin_names
from raycore.reasoning_tags import ReasoningTags
from raycore.server.parsers.harmony import CHANNEL, END, MESSAGE, START, Body, Event, HarmonyReader, Header, Joined
from raycore.server.parsers.tags import num_begun


class ReasoningPiece(NamedTuple):
    """The next piece of a message: some reasoning, followed by some content. Either may be empty."""

    reasoning: str
    content: str


class Origin(NamedTuple):
    """Where a piece of the content stands in the message's text. It ends where the next one begins."""

    position: int
    """Where it begins in the content, in characters."""
    start: int | None
    """Where it begins in the message's text. None: it isn't there."""


class ReasoningParser:
    """Reads one message, piece by piece. How the text is split into pieces doesn't change the result.

    Reasoning that is never closed extends to the end of the message. The reasoning's tags belong neither to the
    reasoning nor to the content. White space after the opening tag is reasoning, after the closing tag content.
    """

    opening: ClassVar[str] = "<think>"
    """The tag before the reasoning. The prompt ends with this tag, or the model writes it."""
    closing: ClassVar[str] = "</think>"
    """The tag after the reasoning."""
    forced: ClassVar[str] = ""
    """What ends reasoning that has become too long. Empty: `closing`."""
    switch: ClassVar[str | None] = None
    """The variable of the chat template that turns reasoning off if the variable is false; None: there is none."""
    calls_end_reasoning: ClassVar[bool] = False
    """Whether the model may call tools without closing its reasoning."""

    def __init__(self, is_reasoning: bool = True, call: str | None = None) -> None:
        """Start at the beginning of a message.

        Args:
            is_reasoning: whether the message begins with reasoning, with or without the opening tag.
            call: the tag that opens a tool call. If `calls_end_reasoning`, this tag also ends the reasoning, and is
                part of the content.
        """
        self.is_reasoning = is_reasoning
        """Whether the text read so far ends in reasoning."""
        self.reasoning_length = 0
        """Number of characters of the reasoning so far, including its tags. Final once the reasoning has ended."""
        self._ends = [self.closing, *([call] if call is not None and self.calls_end_reasoning else [])]
        self._may_open = is_reasoning
        self._buffer = ""
        """Text that has arrived but hasn't been returned yet."""

    def feed(self, text: str) -> ReasoningPiece:
        """Take the next piece of text. Returns the reasoning and content that are certain now."""
        self._buffer += text
        return self._run(is_last=False)

    def finish(self) -> ReasoningPiece:
        """End the message. Returns the rest of its reasoning and content."""
        return self._run(is_last=True)

    @property
    def origins(self) -> Sequence[Origin]:
        """Where the content's pieces stand in the message's text, in order."""
        return (Origin(0, self.reasoning_length),)

    def _run(self, is_last: bool) -> ReasoningPiece:
        reasoning = content = ""
        if self._may_open:
            self._skip_opening(is_last)
        if self.is_reasoning and not self._may_open:
            reasoning = self._take_reasoning(is_last)
        if not self.is_reasoning:
            content, self._buffer = self._buffer, ""
        return ReasoningPiece(reasoning, content)

    def _skip_opening(self, is_last: bool) -> None:
        """Drop the opening tag if the message begins with it. Do nothing while that is uncertain."""
        rest = self._buffer.lstrip()
        if rest.startswith(self.opening):
            self._drop(len(self._buffer) - len(rest) + len(self.opening))
        elif self.opening.startswith(rest) and not is_last:
            return
        self._may_open = False

    def _take_reasoning(self, is_last: bool) -> str:
        found = [(position, tag) for tag in self._ends if (position := self._buffer.find(tag)) >= 0]
        if found:
            position, tag = min(found)
            reasoning = self._drop(position)
            if tag == self.closing:
                self._drop(len(tag))
            self.is_reasoning = False
            return reasoning
        num_undecided = 0 if is_last else max(num_begun(self._buffer, tag) for tag in self._ends)
        return self._drop(len(self._buffer) - num_undecided)

    def _drop(self, num: int) -> str:
        dropped, self._buffer = self._buffer[:num], self._buffer[num:]
        self.reasoning_length += num
        return dropped


class DeepSeekR1Parser(ReasoningParser):
    """For DeepSeek R1 and its distilled models. These models always reason, unless the prompt closes the reasoning."""


class Qwen3Parser(ReasoningParser):
    """For Qwen 3 models. They reason unless the request turns reasoning off. A tool call may end the reasoning, too."""

    switch = "enable_thinking"
    calls_end_reasoning = True


class Glm45ReasoningParser(Qwen3Parser):
    """For GLM-4.5 to 4.7. GLM-4.7's chat template opens the reasoning, the models before open it themselves."""


class MiniMaxM2ReasoningParser(ReasoningParser):
    """For MiniMax-M2 models. They always reason: the chat template opens the reasoning. A tool call may end it, too."""

    calls_end_reasoning = True


class HarmonyParser(ReasoningParser):
    """For gpt-oss. Messages on the channel `analysis` are reasoning, wherever they are."""

    opening = f"{CHANNEL}analysis{MESSAGE}"
    closing = f"{CHANNEL}final{MESSAGE}"
    forced = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
    calls_end_reasoning = True

    def __init__(self, is_reasoning: bool = True, call: str | None = None) -> None:
        super().__init__(is_reasoning, call)
        self._reader = HarmonyReader(None if is_reasoning else Header("", None, None))
        self._keeps_tags = call is not None
        """Whether a tool parser reads the content."""
        self._in_analysis = False
        self._reasoning, self._content = Joined(), Joined()
        self._num_read = 0
        """Number of characters of the events so far."""
        self._num_content = 0
        self._origins: list[Origin] = []

    @property
    def origins(self) -> Sequence[Origin]:
        return self._origins

    def feed(self, text: str) -> ReasoningPiece:
        return self._read(self._reader.feed(text))

    def finish(self) -> ReasoningPiece:
        return self._read(self._reader.finish())

    def _read(self, events: list[Event]) -> ReasoningPiece:
        reasoning: list[str] = []
        content: list[str] = []
        for event in events:
            if isinstance(event, Header):
                self._in_analysis = event.is_reasoning
                self.is_reasoning = self.is_reasoning and event.is_reasoning
                (self._reasoning if self._in_analysis else self._content).begin()
            if self.is_reasoning:
                self.reasoning_length += len(event.text)
            if self._in_analysis:
                reasoning += [self._reasoning.separator(), event.text] if isinstance(event, Body) else []
            elif self._keeps_tags:
                content.append(self._placed(event.text, self._num_read))
            elif isinstance(event, Body):
                content.append(self._placed(self._content.separator(), None))
                content.append(self._placed(event.text, self._num_read))
            self._num_read += len(event.text)
        return ReasoningPiece("".join(reasoning), "".join(content))

    def _placed(self, text: str, start: int | None) -> str:
        """The next piece of the content. Notes where it stands, unless it goes on where the one before ends."""
        last = self._origins[-1] if self._origins else Origin(0, None)
        end = None if last.start is None else last.start + self._num_content - last.position
        if text and (start is None or start != end):
            self._origins.append(Origin(self._num_content, start))
        self._num_content += len(text)
        return text


PARSERS: Mapping[str, type[ReasoningParser]] = MappingProxyType(
    {
        "deepseek_r1": DeepSeekR1Parser,
        "qwen3": Qwen3Parser,
        "glm45": Glm45ReasoningParser,
        "minimax_m2": MiniMaxM2ReasoningParser,
        "openai_gptoss": HarmonyParser,
    }
)


def tags_of(parser: type[ReasoningParser]) -> ReasoningTags:
    """The tags of a parser, for `thinking_token_budget`."""
    return ReasoningTags(parser.opening, parser.closing, parser.forced)


def parser_named(name: str) -> type[ReasoningParser]:
    """The parser class with this name, of raycore or of a plugin. Raises InvalidConfig if there is none."""
    parser = PARSERS.get(name) or find_plugin(REASONING_PARSERS, name)
    if parser is None:
        names = [*PARSERS, *plugin_names(REASONING_PARSERS)]
        raise InvalidConfig(f"reasoning_parser={name!r} isn't one of {', '.join(names)}")
    return parser
