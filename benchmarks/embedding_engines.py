"""One engine of `embeddings.py`, as a process of its own: it may run on another environment's Python, without raycore.

    python benchmarks/embedding_engines.py ENGINE RUN.json

It loads the engine, reports that, and reads a line with two numbers for each timing: texts of a call, and tokens of a
text (0: between 8 and 512). Peers that pad texts to a common length try several batch sizes before their first timing
of a shape, and take the fastest one.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Embed = Callable[[list[str], int], Sequence[Any]]
"""Gets texts, and how many of them to compute at a time, and returns their embeddings."""
BATCH_SIZES = (1, 4, 16, 64)
TIMED_TOKENS = 4096
"""A timing makes as many calls as this takes, if a call has fewer tokens."""


def raycore(run: dict[str, Any]) -> Embed:
    from raycore import LLM

    return _engine(LLM, run, num_threads=run["num_threads"])


def vllm(run: dict[str, Any]) -> Embed:
    from vllm import LLM

    return _engine(LLM, run, disable_log_stats=True)


def _engine(kind: Any, run: dict[str, Any], **options: Any) -> Embed:
    llm = kind(
        model=run["checkpoint"], dtype=run["dtype"], runner="pooling", max_model_len=512, enable_prefix_caching=False,
        **options,
    )  # fmt: skip
    return lambda texts, _: [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)]


def fastembed(run: dict[str, Any]) -> Embed:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    pooling = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS}[run["pooling"]]
    TextEmbedding.add_custom_model(
        "own/model", pooling=pooling, normalization=True, sources=ModelSource(hf="own/model"), dim=run["size"],
        model_file="onnx/model.onnx",
    )  # fmt: skip
    model = TextEmbedding("own/model", specific_model_path=run["checkpoint"], threads=run["num_threads"])
    return lambda texts, batch_size: list(model.embed(texts, batch_size=batch_size))


def openvino(run: dict[str, Any]) -> Embed:
    from sentence_transformers import SentenceTransformer

    config = {"INFERENCE_NUM_THREADS": str(run["num_threads"]), "PERFORMANCE_HINT": "LATENCY"}
    if run["dtype"] == "float32":  # otherwise its default, which is bfloat16 if the processor has it
        config["INFERENCE_PRECISION_HINT"] = "f32"
    model = SentenceTransformer(
        run["checkpoint"], backend="openvino",
        model_kwargs={"ov_config": config, "file_name": "openvino/openvino_model.xml"},
    )  # fmt: skip
    return lambda texts, batch_size: model.encode(texts, batch_size=batch_size, show_progress_bar=False)


ENGINES = {"raycore": raycore, "fastembed": fastembed, "openvino": openvino, "vllm": vllm}
PADDING = ("fastembed", "openvino")


def export(run: dict[str, Any]) -> None:
    """Write the checkpoint's model as ONNX and for OpenVINO, both in float32."""
    from sentence_transformers import SentenceTransformer

    for backend in ("onnx", "openvino"):
        kwargs = {"export": True, **({"provider": "CPUExecutionProvider"} if backend == "onnx" else {})}
        SentenceTransformer(run["checkpoint"], backend=backend, model_kwargs=kwargs).save_pretrained(run["checkpoint"])


def texts_of(words: Sequence[str], count: int, tokens: int, num_texts: int) -> list[str]:
    """Return texts of so many tokens, two of which the tokenizer adds."""
    chance = random.Random(f"{count} {tokens}")
    lengths = [tokens or int(math.exp(chance.uniform(math.log(8), math.log(512)))) for _ in range(num_texts)]
    return [" ".join(chance.choice(words) for _ in range(length - 2)) for length in lengths]


def main() -> None:
    """Answer each line with the texts per second, and the first time with some embeddings."""
    engine, path = sys.argv[1:]
    run = json.loads(Path(path).read_text())
    if engine == "export":
        export(run)
        return
    embed = ENGINES[engine](run)
    _report(ready=True)
    best: dict[tuple[int, int], int] = {}
    for line in sys.stdin:
        count, tokens = map(int, line.split())
        texts = texts_of(run["words"], count, tokens, max(count, TIMED_TOKENS // tokens if tokens else 0))
        chosen = best.get((count, tokens))
        if chosen is None:
            sizes = [size for size in BATCH_SIZES if size <= count] if engine in PADDING else [count]
            for size in sizes:
                embed(texts[:count], size)
            chosen = best[count, tokens] = min(sizes, key=lambda size: _least_s(embed, texts[:count], size))
            seconds, embeddings = _seconds(embed, texts, count, chosen)
            kept = [[float(x) for x in each] for each in embeddings[:8]]
            _report(rate=len(texts) / seconds, batch_size=chosen, embeddings=kept)
            continue
        _report(rate=len(texts) / _seconds(embed, texts, count, chosen)[0])


def _seconds(embed: Embed, texts: list[str], count: int, batch_size: int) -> tuple[float, list[Any]]:
    begun = time.perf_counter()
    embeddings: list[Any] = []
    for first in range(0, len(texts), count):
        embeddings += list(embed(texts[first : first + count], batch_size))
    return time.perf_counter() - begun, embeddings


def _least_s(embed: Embed, texts: list[str], batch_size: int) -> float:
    return min(_seconds(embed, texts, len(texts), batch_size)[0] for _ in range(3))


def _report(**fields: Any) -> None:
    print("@result " + json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
