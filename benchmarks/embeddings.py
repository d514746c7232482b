"""Texts per second of `LLM.embed`, and how alike embeddings are: raycore and vLLM's CPU build in alternating runs.

A shape is how many texts a call gets, and how many tokens they have on average. The lengths of the texts of a call
differ by up to a half of that. Texts are words of a random vocabulary, which both engines tokenize. Both engines use
all cores: raycore has `num_threads`, and vLLM is bound to the cores and has Intel's OpenMP, as its documentation
recommends, and runs compiled. Prefix caching is off. Each run is a new process that warms up, then times every shape
`--repeats` times: calls for about 64 texts of each. The tables have medians over all timings. *Cosine* is the least
similarity of both engines' embeddings of the same text.

Checkpoints are made on the spot, with random weights: an encoder as MiniLM's, with 6 or 12 layers and the mean of all
tokens; as BERT-base, with the first token; as XLM-R's base size, with the mean, but with a smaller vocabulary; and as
ModernBERT-base. A decoder such as Qwen3's, with the last token, has to be given with `--decoder`.

    python benchmarks/embeddings.py --peer-python PEER/bin/python [--decoder CHECKPOINT]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import PEER_ENVIRONMENT, median, peer_on_all_cores, run_child, table, this_python

from raycore.node.resources import usable_cores

Shape = tuple[int, int]
SHAPES: list[Shape] = [(1, 32), (1, 128), (64, 32), (64, 128)]
NUM_WORDS = 29_000
SETTLE_S = 20.0
"""How long each engine rests after its start. Meanwhile raycore starts the standby of its rank."""
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "minilm6": ("Bert", "mean", {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}),
    "minilm12": ("Bert", "mean", {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12}),
    "bert_base": ("Bert", "cls", {}),
    "xlmr_base": ("XLMRoberta", "mean", {"max_position_embeddings": 514, "type_vocab_size": 1}),
    "modernbert_base": ("ModernBert", "mean", {}),
}
"""By name: the family, how tokens are pooled, and what differs from the configuration's defaults."""

COMMON = """
import json, random, sys, time
with open(sys.argv[1]) as file:
    run = json.load(file)

def texts_of(shape):
    count, length = shape
    rnd = random.Random(str(shape))
    def text():
        size = rnd.randint(length // 2, length + length // 2)
        return " ".join(run["words"][rnd.randrange(len(run["words"]))] for _ in range(size - 2))
    return [text() for _ in range(64)]

def measure(LLM, **options):
    started = time.time()
    llm = LLM(model=run["checkpoint"], dtype=run["dtype"], runner="pooling", max_model_len=run["max_model_len"],
              enable_prefix_caching=False, **options)
    started = time.time() - started
    time.sleep(run["settle_s"])
    def calls(texts, count):
        begun = time.perf_counter()
        outputs = []
        for first in range(0, len(texts), count):
            outputs += llm.embed(texts[first:first + count], use_tqdm=False)
        return len(texts) / (time.perf_counter() - begun), outputs
    rates, embeddings = {}, {}
    for shape in map(tuple, run["shapes"]):
        texts = texts_of(shape)
        calls(texts, shape[0])
        timings = [calls(texts, shape[0]) for _ in range(run["repeats"])]
        rates[str(shape)] = [rate for rate, _ in timings]
        embeddings[str(shape)] = [[round(x, 7) for x in each.outputs.embedding] for each in timings[0][1]]
    with open(run["out"], "w") as file:
        json.dump(embeddings, file)
    print("@result " + json.dumps({"startup": started, "rates": rates}), flush=True)
    return llm
"""
OURS = (
    COMMON
    + """
from raycore import LLM
if __name__ == "__main__":
    measure(LLM, num_threads=run["num_threads"]).shutdown()
"""
)
PEER = (
    COMMON
    + """
if __name__ == "__main__":
    from vllm import LLM
    measure(LLM, disable_log_stats=True)
"""
)


def main() -> None:
    """Run the benchmark and print a table for each checkpoint and data type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", metavar="PATH", help="the interpreter that has vLLM; without it only raycore")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--decoder", metavar="CHECKPOINT", help="a decoder that embeds, too")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, metavar="TEXTS,TOKENS")
    parser.add_argument("--runs", type=int, default=2, help="processes per engine")
    parser.add_argument("--repeats", type=int, default=3, help="timings per shape in one process")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for one process")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: (make_checkpoint(Path(folder) / name, name), _words()) for name in args.models}
        if args.decoder:
            paths["decoder"] = Path(args.decoder), _words_of(Path(args.decoder))
        for name, (path, words) in paths.items():
            for dtype in args.dtypes:
                _compare(name, path, words, dtype, args, Path(folder))


def make_checkpoint(path: Path, name: str) -> Path:
    """Write an encoder with random weights, a tokenizer, and sentence-transformers' files."""
    import torch
    import transformers

    family, pooling, changes = MODELS[name]
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    config = getattr(transformers, f"{family}Config")(vocab_size=NUM_WORDS + 4, **{**tokens, **changes})
    torch.manual_seed(0)
    getattr(transformers, f"{family}Model")(config).to(torch.bfloat16).save_pretrained(path)
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
    count, length = (int(part) for part in text.split(","))
    return count, length


def _compare(name: str, path: Path, words: list[str], dtype: str, args: argparse.Namespace, folder: Path) -> None:
    cores = usable_cores()
    engines = {"raycore": (this_python(), OURS, {})}
    if args.peer_python:
        engines["vLLM"] = (args.peer_python, PEER, PEER_ENVIRONMENT | peer_on_all_cores(args.peer_python, 1))
    rates: dict[str, dict[str, list[float]]] = {engine: defaultdict(list) for engine in engines}
    embeddings: dict[str, dict[str, Any]] = {}
    run = {
        "checkpoint": str(path),
        "dtype": dtype,
        "shapes": args.shapes,
        "repeats": args.repeats,
        "words": words,
        "max_model_len": 512,
        "num_threads": cores,
        "settle_s": SETTLE_S,
    }
    script_arguments = folder / "run.json"
    for _ in range(args.runs):
        for engine, (python, script, environment) in engines.items():
            out = folder / f"{engine}.json"
            script_arguments.write_text(json.dumps(run | {"out": str(out)}))
            fields = run_child(python, script, [str(script_arguments)], environment, args.timeout_s)
            for shape, values in fields["rates"].items():
                rates[engine][shape] += values
            embeddings[engine] = json.loads(out.read_text())
            print(f"{name} {dtype} {engine}: {fields['rates']}", file=sys.stderr)
    print(f"\n{name}, {dtype}, {cores} cores: texts per second, medians of {args.runs} x {args.repeats} timings")
    print(_rows(rates, embeddings, args.shapes), flush=True)


def _rows(rates: dict[str, dict[str, list[float]]], embeddings: dict[str, Any], shapes: Sequence[Shape]) -> str:
    rows: list[list[str]] = [["texts at a time", "tokens", *rates, *(["ratio", "cosine"] if len(rates) > 1 else [])]]
    for shape in shapes:
        medians = [median(by_shape[str(shape)]) for by_shape in rates.values()]
        row = [*map(str, shape), *(f"{value:.1f}" for value in medians)]
        if len(rates) > 1:
            ours, peers = (np.array(by_shape[str(shape)]) for by_shape in embeddings.values())
            norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(peers, axis=1)
            row += [f"{medians[0] / medians[1]:.2f}", f"{((ours * peers).sum(1) / norms).min():.6f}"]
        rows.append(row)
    return table(rows)


if __name__ == "__main__":
    main()
