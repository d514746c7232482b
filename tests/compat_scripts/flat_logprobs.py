"""Log probabilities in flat lists."""

import os

from vllm import LLM, SamplingParams
from vllm.logprobs import FlatLogprobs


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)
    prompt = "27 + 58 ="
    (flat,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3, logprobs=2, flat_logprobs=True))
    (plain,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3, logprobs=2))
    found = flat.outputs[0].logprobs
    assert isinstance(found, FlatLogprobs)
    assert len(found) == 3
    assert [{token: each.rank for token, each in position.items()} for position in found] == [
        {token: each.rank for token, each in position.items()} for position in plain.outputs[0].logprobs
    ]


if __name__ == "__main__":
    main()
