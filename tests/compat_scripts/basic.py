"""Continues several prompts in one call."""

import os

from vllm import LLM, SamplingParams

SUMS = {"27 + 58 =": " 85", "11 + 12 =": " 23", "40 - 15 =": " 25", "60 + 31 =": " 91"}


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)
    outputs = llm.generate(list(SUMS), SamplingParams(temperature=0, max_tokens=8))
    for output, (prompt, answer) in zip(outputs, SUMS.items(), strict=True):
        assert output.prompt == prompt
        assert output.outputs[0].text.rstrip("\n") == answer
        assert output.finished
        assert output.outputs[0].finish_reason == "stop"


if __name__ == "__main__":
    main()
