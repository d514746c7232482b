"""Classes, from a model that generates: those of two tokens."""

import math
import os

from vllm import LLM, PoolingParams

OVERRIDES = {
    "architectures": ["LlamaForSequenceClassification"],
    "classifier_from_token": ["1", "2"],
    "method": "no_post_processing",
}


def main():
    llm = LLM(model=os.environ["MODEL"], runner="pooling", hf_overrides=OVERRIDES, max_model_len=256)
    outputs = llm.classify(["27 + 58 =", "11 + 12 ="])
    for output in outputs:
        assert len(output.outputs.probs) == 2
        assert math.isclose(sum(output.outputs.probs), 1, abs_tol=1e-3)
    raw = llm.classify(["27 + 58 ="], pooling_params=PoolingParams(use_activation=False))
    a, b = raw[0].outputs.probs
    assert math.isclose(1 / (1 + math.exp(b - a)), outputs[0].outputs.probs[0], abs_tol=2e-2)


if __name__ == "__main__":
    main()
