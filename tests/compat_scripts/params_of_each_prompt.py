"""A sampling parameter for each prompt."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 2, 3)]
    outputs = llm.generate(["1 + 1 =", "2 + 2 =", "3 + 3 ="], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert len({output.request_id for output in outputs}) == 3


if __name__ == "__main__":
    main()
