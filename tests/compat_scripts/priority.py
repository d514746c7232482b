"""Requests with lower numbers run first."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256, max_num_seqs=1, scheduling_policy="priority")
    prompts = [f"{number} + 11 =" for number in range(20, 26)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), priority=[5, 4, 3, 2, 1, 0])
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text.strip() for output in outputs] == [str(number + 11) for number in range(20, 26)]


if __name__ == "__main__":
    main()
