"""Writes what is derived from the options' declarations: `docs/options.md` and `raycore/option_types.py`.

python docs/write_options.py

The declarations are in raycore/config.py and raycore/server/options.py; vLLM's options without effect in
raycore/vllm_options.py.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from raycore.config import ENGINE_OPTIONS
from raycore.options import Option
from raycore.server.options import SERVER_OPTIONS
from raycore.vllm_options import VLLM_OPTIONS, VLLM_SERVER_FLAGS, VllmOption

ROOT = Path(__file__).parents[1]
OF_THE_SIGNATURE = ("model", "tokenizer")
"""Options that are parameters of their own where the others are `**options`."""

PAGE_START = """\
# Options

<!-- written by docs/write_options.py -->

An option has the same name everywhere: `LLM("DIR", max_num_seqs=64)` and `AsyncLLM` in Python, `--max-num-seqs 64`
for `raycore generate`, `serve` and `run-batch`, `max_num_seqs: 64` below `args` of Ray Serve. `raycore serve --help`
has the same texts. A flag is the option's name with hyphens, or with underscores, unless the table says otherwise;
those that turn something on have a `--no-` form. In Python None is the default of an option that is never None
itself. On the command line None is written `none`. Only in Python has the model to be given.

`--config FILE.yaml` reads flags from a file, by their names without the leading hyphens. The command line wins:

```yaml
model: /models/my-model
data-parallel-size: 2
enable-prefix-caching: false
served-model-name: [chat, default]
```
"""

SERVER_START = """\
## Server

For `raycore serve`, and, but for the API keys, Ray Serve. Those that do not concern HTTP are for `raycore run-batch`,
too.
"""

COLLISIONS = {
    "`--wait-for-nodes`": "`wait_for_nodes_s`. `--wait-for-nodes-s` is the same.",
    "`--seed`": "Of `serve` and `run-batch` the engine's `seed`, as in vLLM; of `generate` the requests'. "
    "`--engine-seed` is the engine's everywhere.",
    "`--shutdown-timeout`": "Of `serve` and `run-batch`: seconds to finish requests in after SIGTERM or Ctrl-C. "
    "`shutdown_timeout_s`, for workers to stop, is `--worker-shutdown-timeout-s`.",
    "`--drain-timeout`": "Of `generate` what `--shutdown-timeout` is of `serve`; of `scale` what replaces "
    "`drain_timeout_s` this time. `drain_timeout_s`, for ranks that leave, is `--rank-drain-timeout-s`.",
    "`--max-concurrent-requests`": "Of `serve`, and under Ray Serve of each replica: requests beyond which a client "
    "gets a 429. Of `run-batch`: requests that are given to the engine at a time.",
    "`--disable-log-stats`": "Of `serve`: no line in the log every 10 s. Elsewhere it has no effect.",
    "`--api-key`": "Of `serve`. Under Ray Serve only the variable RAYCORE_API_KEY, so that no manifest has a secret.",
}
"""What a flag means where its name says too little."""

VLLM_START = """\
## vLLM's options without effect

Taken with None or a value below, so that scripts and command lines that name them run as they are. Any other value is
refused by name.
"""


def page() -> str:
    """The text of docs/options.md."""
    parts = [PAGE_START]
    for group, members in groupby(ENGINE_OPTIONS.values(), key=lambda each: each.group):
        parts += [f"## {group}\n", _table(members)]
    parts += [SERVER_START, _table(SERVER_OPTIONS.values())]
    parts += ["## Flags that need a word\n", "| | |\n|---|---|"]
    parts += [f"| {flag} | {meaning} |" for flag, meaning in COLLISIONS.items()]
    parts += ["", VLLM_START, _vllm_table(VLLM_OPTIONS.values())]
    parts += ["Flags of `raycore serve` alone:\n", _vllm_table(VLLM_SERVER_FLAGS.values())]
    return "\n".join(parts).rstrip() + "\n"


def types() -> str:
    """The text of raycore/option_types.py."""
    return "\n".join(
        [
            '"""The options of `LLM(...)` for type checkers and editors. Written by docs/write_options.py."""\n',
            "from __future__ import annotations\n",
            "from typing import Any, Literal, TypedDict\n\n",
            "class VllmOptions(TypedDict, total=False):",
            '    """Options of vLLM\'s that have no effect, and are refused where they ask for something."""\n',
            *[f"    {each.name}: object" for each in VLLM_OPTIONS.values()],
            "\n",
            "class EngineOptions(VllmOptions, total=False):",
            '    """Options of an engine beside its model and tokenizer."""\n',
            *[line for each in ENGINE_OPTIONS.values() if each.name not in OF_THE_SIGNATURE for line in _field(each)],
            "",
        ]
    )


def _table(options: Iterable[Option]) -> str:
    rows = ["| option | value | default | |", "|---|---|---|---|"]
    for each in options:
        flags = "" if f"--{each.name.replace('_', '-')}" == each.flags[0] else f"<br>{_code(each.flags)}"
        default = each.default_text or ""
        rows.append(f"| `{each.name}`{flags} | {each.expected} | {default} | {each.help} |")
    return "\n".join([*rows, ""])


def _vllm_table(options: Iterable[VllmOption]) -> str:
    rows = ["| option | without effect | why |", "|---|---|---|"]
    for each in options:
        values = (
            "any value" if each.takes_any else ", ".join(f"`{value!r}`" for value in each.values if value is not None)
        )
        rows.append(f"| `{each.name}` | {values} | {each.reason} |")
    return "\n".join([*rows, ""])


def _code(flags: Iterable[str]) -> str:
    return ", ".join(f"`{flag}`" for flag in flags)


def _field(option: Option) -> Iterator[str]:
    yield f"    {option.name}: {_type_text(option.annotation)}"
    default = f" Default: {option.default_text}." if option.default_text is not None else ""
    yield textwrap.indent("\n".join(textwrap.wrap(f'"""{option.help}{default}"""', 116)), "    ")


def _type_text(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(_type_text, get_args(hint)))
    if get_origin(hint) is Literal:
        return f"Literal[{', '.join(f'{chr(34)}{name}{chr(34)}' for name in get_args(hint))}]"
    return "None" if hint is NoneType else inspect.formatannotation(hint).replace("typing.", "")


FILES = {ROOT / "docs" / "options.md": page, ROOT / "raycore" / "option_types.py": types}
"""What is written, and what it says."""

if __name__ == "__main__":
    for path, text in FILES.items():
        path.write_text(text(), encoding="utf-8")
