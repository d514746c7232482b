"""Texts per second of `LLM.embed`, and how alike embeddings are, beside other engines on the same processor.

The peers are vLLM's CPU build, fastembed (ONNX Runtime), and sentence-transformers with its OpenVINO backend. A shape
is how many texts a call gets, and how many tokens each has. `mix` is 8 to 512 tokens, short texts being more frequent:
the logarithms of lengths are spread evenly. Texts are words of a random vocabulary, which each engine tokenizes.

All engines compute the same checkpoint, made on the spot in float32 with random weights, and exported for ONNX and for
OpenVINO: an encoder as MiniLM's, with 6 or 12 layers and the mean of all tokens; as BERT-base, with the first token; as
XLM-R's base size, with the mean, but with a smaller vocabulary; and as ModernBERT-base. A decoder such as Qwen3's, with
the last token, can be given with `--decoder`, for raycore and vLLM.

Each engine is a process (`embedding_engines.py`) on all cores. vLLM is bound to them and has Intel's OpenMP, as its
documentation recommends, and runs compiled. Those that pad texts have the batch size that is best for the shape.
fastembed computes in float32 in both tables, and OpenVINO in what it chooses by itself in that of bfloat16. All
processes are there the whole time, and take turns, with a rest between them: each shape has `--repeats` rounds, and
each round a timing of each engine. The tables have medians, and `ratio` is raycore over the best peer.

    python benchmarks/embeddings.py [--peer-python VLLM/bin/python] [--onnx-python OTHERS/bin/python]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import MARK, PEER_ENVIRONMENT, median, peer_on_all_cores, table, this_python

from raycore.node.resources import usable_cores

ENGINES = str(Path(__file__).with_name("embedding_engines.py"))
Shape = tuple[int, int]
MIX = 0
SHAPES: list[Shape] = [(1, 32), (1, 128), (1, 512), (64, 32), (64, 128), (64, 512), (64, MIX)]
NUM_WORDS = 29_000
SETTLE_S = 20.0
"""How long engines rest after their start. Meanwhile raycore starts the standby of its rank."""
REST_S = 1.5
"""How long all engines rest before a timing. vLLM's threads spin for up to a second after their last text."""
MINILM = {"hidden_size": 384, "intermediate_size": 1536}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "minilm6": ("Bert", "mean", {"num_attention_heads": 12, "num_hidden_layers": 6, **MINILM}),
    "minilm12": ("Bert", "mean", {"num_attention_heads": 12, "num_hidden_layers": 12, **MINILM}),
    "bert_base": ("Bert", "cls", {}),
    "xlmr_base": ("XLMRoberta", "mean", {"max_position_embeddings": 514, "type_vocab_size": 1}),
    "modernbert_base": ("ModernBert", "mean", {}),
}
"""By name: the family, how tokens are pooled, and what differs from the configuration's defaults."""


class Engine:
    """A process with an engine."""

    def __init__(self, name: str, python: str, run: Mapping[str, Any], folder: Path, environment: Mapping[str, str]):
        self._name, self._log = name, folder / f"{name}.log"
        arguments = folder / f"{name}.json"
        arguments.write_text(json.dumps(run))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, ENGINES, name, str(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment},
            )

    def answer(self) -> dict[str, Any]:
        """Wait for the next report. Raises RuntimeError, with the end of what the process has written, if it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if MARK in line:
                return json.loads(line[line.index(MARK) + len(MARK) :])
        raise RuntimeError(f"{self._name} has ended:\n{self._log.read_text()[-3000:]}")

    def time(self, shape: Shape) -> dict[str, Any]:
        """Have the engine compute the shape's texts once, and return its report."""
        assert self._process.stdin is not None
        time.sleep(REST_S)
        print(*shape, file=self._process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def main() -> None:
    """Run the benchmark and print a table for each checkpoint and data type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", metavar="PATH", help="the interpreter that has vLLM")
    parser.add_argument(
        "--onnx-python", metavar="PATH", help="the one that has fastembed and sentence-transformers[onnx,openvino]"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--decoder", metavar="CHECKPOINT", help="a decoder that embeds, too")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, metavar="TEXTS,TOKENS")
    parser.add_argument("--repeats", type=int, default=3, help="timings of an engine and a shape")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in args.models:
            path = make_checkpoint(folder / model, model)
            own = {"checkpoint": str(path), "words": _words(), "pooling": MODELS[model][1]}
            _compare(model, own, args, folder)
        if args.decoder:
            words = _words_of(Path(args.decoder))
            args.onnx_python = None
            _compare("decoder", {"checkpoint": args.decoder, "words": words}, args, folder)


def make_checkpoint(path: Path, name: str) -> Path:
    """Write an encoder with random weights, a tokenizer, and sentence-transformers' files."""
    import torch
    import transformers

    family, pooling, changes = MODELS[name]
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    config = getattr(transformers, f"{family}Config")(vocab_size=NUM_WORDS + 4, **{**tokens, **changes})
    torch.manual_seed(0)
    getattr(transformers, f"{family}Model")(config).save_pretrained(path)
    _write_tokenizer(path)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    kinds = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, (folder, kind) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(kinds))
    (path / "1_Pooling").mkdir(exist_ok=True)
    pool = {f"pooling_mode_{key}": key.startswith(pooling) for key in ("cls_token", "mean_tokens")}
    pool_config = {"word_embedding_dimension": config.hidden_size, **pool}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pool_config))
    return path


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_words()])}
    native = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    native.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    native.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    native.save(str(path / "tokenizer.json"))
    names = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **names}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _words() -> list[str]:
    """Words that are a token each."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    places = (676, 26, 1, 17576)
    return ["".join(letters[i // place % 26] for place in places) for i in range(NUM_WORDS)]


def _words_of(path: Path) -> list[str]:
    """Words that are a token each in a checkpoint's tokenizer, after a space."""
    from tokenizers import Tokenizer

    native = Tokenizer.from_file(str(path / "tokenizer.json"))
    words = [native.decode([token]).strip() for token in range(native.get_vocab_size())]
    return [word for word in dict.fromkeys(words) if word.isalpha() and len(native.encode(f" {word}").ids) == 1]


def _shape(text: str) -> Shape:
    count, length = text.split(",")
    return int(count), MIX if length == "mix" else int(length)


def _compare(model: str, own: Mapping[str, Any], args: argparse.Namespace, folder: Path) -> None:
    cores, peers = usable_cores(), PEER_ENVIRONMENT
    pythons: dict[str, tuple[str, Mapping[str, str]]] = {"raycore": (this_python(), {})}
    run = {**own, "num_threads": cores}
    if args.onnx_python:
        config = json.loads((Path(own["checkpoint"]) / "config.json").read_text())
        run["size"] = config["hidden_size"]
        pythons |= dict.fromkeys(("fastembed", "openvino"), (args.onnx_python, peers))
        (folder / "export.json").write_text(json.dumps(run))
        exported = [args.onnx_python, ENGINES, "export", str(folder / "export.json")]
        subprocess.run(exported, env={**os.environ, **peers}, check=True, stdout=sys.stderr)
    if args.peer_python:
        pythons["vllm"] = args.peer_python, peers | peer_on_all_cores(args.peer_python, 1)
    for dtype in args.dtypes:
        engines = {
            name: Engine(name, python, {**run, "dtype": dtype}, folder, environment)
            for name, (python, environment) in pythons.items()
        }
        for engine in engines.values():
            engine.answer()
        time.sleep(SETTLE_S)
        print(f"\n{model}, {dtype}, {cores} cores: texts per second, medians of {args.repeats} timings", flush=True)
        _measure(engines, args)
        for engine in engines.values():
            engine.end()


def _measure(engines: Mapping[str, Engine], args: argparse.Namespace) -> None:
    rows: list[list[str]] = [["texts", "tokens", *engines, *["ratio"] * (len(engines) > 1)]]
    cosines: dict[str, list[float]] = defaultdict(list)
    for shape in args.shapes:
        first = {name: engine.time(shape) for name, engine in engines.items()}
        rates = {name: [each["rate"]] for name, each in first.items()}
        for _ in range(args.repeats - 1):
            for name, engine in engines.items():
                rates[name].append(engine.time(shape)["rate"])
        print(shape, rates, {name: each["batch_size"] for name, each in first.items()}, file=sys.stderr, flush=True)
        medians = [median(each) for each in rates.values()]
        ratio = [f"{medians[0] / max(medians[1:]):.2f}"] if len(medians) > 1 else []
        rows.append([str(shape[0]), str(shape[1] or "mix"), *(f"{rate:.1f}" for rate in medians), *ratio])
        found = {name: _normalized(each["embeddings"]) for name, each in first.items()}
        for name in found:
            cosines[name].append(float((found[name] * list(found.values())[min(1, len(found) - 1)]).sum(1).min()))
    print(table(rows))
    print("least cosine with the first peer's:", ", ".join(f"{name} {min(each):.6f}" for name, each in cosines.items()))


def _normalized(rows: Sequence[Sequence[float]]) -> np.ndarray:
    array = np.array(rows)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


if __name__ == "__main__":
    main()
