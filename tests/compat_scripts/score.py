"""Scores of pairs of texts, from a model that generates."""

import os

from vllm import LLM

OVERRIDES = {
    "architectures": ["LlamaForSequenceClassification"],
    "classifier_from_token": ["1", "2"],
    "method": "from_2_way_softmax",
}


def main():
    llm = LLM(model=os.environ["MODEL"], runner="pooling", hf_overrides=OVERRIDES, max_model_len=256)
    one_and_many = llm.score("27 + 58 =", ["11 + 12 =", "40 - 15 ="])
    pairs = llm.score(["27 + 58 =", "27 + 58 ="], ["11 + 12 =", "40 - 15 ="])
    scores = [output.outputs.score for output in one_and_many]
    assert all(0 <= score <= 1 for score in scores)
    assert all(abs(a - b.outputs.score) < 1e-2 for a, b in zip(scores, pairs, strict=True))


if __name__ == "__main__":
    main()
