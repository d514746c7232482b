"""`raycore chat` and `raycore complete`: talk to a running server. Flags have vLLM's names."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

from raycore.cli.api_client import ApiClient, ServerRefused
from raycore.cli.parser import Parser

_URL = "http://localhost:8000/v1"


def add_talk_commands(commands: Any) -> None:
    """Add `chat` and `complete` to the command line."""
    chat: Parser = commands.add_parser(
        "chat",
        help="chat with a running server",
        description="Chat with a running server. Ctrl-C ends an answer, and Ctrl-D the conversation.",
    )
    chat.set_defaults(command=_chat)
    _add_flags(chat, "MESSAGE")
    chat.add_argument("--system-prompt", default=None, metavar="TEXT", help="The conversation's system message.")
    complete: Parser = commands.add_parser(
        "complete",
        help="complete texts with a running server",
        description="Complete one text after the other with a running server. Ctrl-C ends an answer, and Ctrl-D the "
        "command.",
    )
    complete.set_defaults(command=_complete)
    _add_flags(complete, "PROMPT")


def _add_flags(command: Parser, what: str) -> None:
    command.add_argument("--url", default=_URL, metavar="URL", help=f"URL of the server's API. Default: {_URL}.")
    command.add_argument(
        "--model-name", default=None, metavar="NAME", help="The model. Default: the first that the server lists."
    )
    command.add_argument(
        "--api-key",
        default=None,
        metavar="KEY",
        help="The server's key. Default: the variable OPENAI_API_KEY, else RAYCORE_API_KEY.",
    )
    command.add_argument(
        "-q", "--quick", default=None, metavar=what, help="Answer this only, print the answer, and end."
    )
    command.add_argument(
        "--max-tokens", type=int, default=None, metavar="N", help="Maximum number of tokens of an answer."
    )
    command.add_argument(
        "--stats",
        action="store_true",
        help="After each answer, print how long it took.",
    )


def _chat(args: argparse.Namespace) -> int:
    client, model = _server(args)
    messages: list[dict[str, str]] = []
    if args.system_prompt is not None:
        messages.append({"role": "system", "content": args.system_prompt})

    def answer(text: str) -> None:
        asked = [*messages, {"role": "user", "content": text}]
        events = client.stream("/chat/completions", _body(args, model, messages=asked))
        said = _show(events, lambda choice: choice["delta"].get("content") or "", args)
        messages[:] = [*asked, {"role": "assistant", "content": said}]

    return _talk(args, answer)


def _complete(args: argparse.Namespace) -> int:
    client, model = _server(args)

    def answer(text: str) -> None:
        _show(client.stream("/completions", _body(args, model, prompt=text)), lambda choice: choice["text"], args)

    return _talk(args, answer)


def _server(args: argparse.Namespace) -> tuple[ApiClient, str]:
    client = ApiClient(args.url, args.api_key)
    model = args.model_name or client.first_model()
    if args.quick is None:
        print(f"Using model: {model}", file=sys.stderr)
    return client, model


def _body(args: argparse.Namespace, model: str, **fields: Any) -> dict[str, Any]:
    if args.max_tokens is not None:
        fields["max_tokens"] = args.max_tokens
    return {"model": model, **fields, "stream_options": {"include_usage": True}}


def _talk(args: argparse.Namespace, answer: Callable[[str], None]) -> int:
    """Answer what is asked for, until there is no more. An error ends only the answer, unless there is only one."""
    if args.quick is not None:
        answer(args.quick)
        return 0
    for text in _asked():
        try:
            answer(text)
        except ServerRefused as error:
            print(f"raycore: {error}", file=sys.stderr)
    return 0


def _asked() -> Iterator[str]:
    """What the user writes, a line after the other, until Ctrl-D, or Ctrl-C instead of a line."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    importlib.import_module("readline")  # lines can be edited, and earlier ones found again

    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text.strip():
            yield text


def _show(
    events: Generator[dict[str, Any], None, None], text_of: Callable[[dict[str, Any]], str], args: argparse.Namespace
) -> str:
    """Print an answer as it arrives. Returns its text. Ctrl-C ends the answer, unless it is the only one."""
    begun_s, first_s, num_tokens = time.monotonic(), None, 0
    parts: list[str] = []
    with closing(events):
        try:
            for event in events:
                for choice in event["choices"]:
                    parts.append(text_of(choice))
                    first_s = first_s or (time.monotonic() if parts[-1] else None)
                    print(parts[-1], end="", flush=True)
                if event.get("usage"):
                    num_tokens = int(event["usage"]["completion_tokens"])
        except KeyboardInterrupt:
            if args.quick is not None:
                raise
        finally:
            print()
    if args.stats and first_s is not None:
        ended_s = time.monotonic()
        rate = num_tokens / (ended_s - begun_s)
        told = f"time to first token {first_s - begun_s:.3f} s, {num_tokens} tokens, {rate:.1f} tokens/s"
        print(f"[{told}]", file=sys.stderr)
    return "".join(parts)
