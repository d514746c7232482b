"""Embeddings of texts."""

import math
import os

from vllm import LLM
from vllm.config import PoolerConfig


def main():
    llm = LLM(
        model=os.environ["MODEL"],
        runner="pooling",
        convert="embed",
        max_model_len=256,
        pooler_config=PoolerConfig(seq_pooling_type="MEAN"),
    )
    outputs = llm.embed(["27 + 58 =", "27 + 58 =", "99 - 12 ="])
    first, same, other = (output.outputs.embedding for output in outputs)
    assert len(first) == 128
    assert math.isclose(sum(each * each for each in first), 1, abs_tol=1e-3)
    assert max(abs(a - b) for a, b in zip(first, same, strict=True)) < 1e-3
    assert max(abs(a - b) for a, b in zip(first, other, strict=True)) > 1e-2
    (score,) = llm.score("27 + 58 =", "27 + 58 =")
    assert math.isclose(score.outputs.score, 1, abs_tol=1e-3)


if __name__ == "__main__":
    main()
