"""Requests that are submitted first and waited for later."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=8)
    first = llm.enqueue(["27 + 58 =", "11 + 12 ="], params)
    second = llm.enqueue("40 - 15 =", params)
    outputs = llm.wait_for_completion()
    assert [output.outputs[0].text.strip() for output in outputs] == ["85", "23", "25"]
    assert len(first) == 2
    assert len(second) == 1


if __name__ == "__main__":
    main()
