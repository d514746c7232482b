"""Several samples of one prompt, in the order of their indices."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256, seed=3)
    params = SamplingParams(n=4, temperature=2.0, max_tokens=6, ignore_eos=True, seed=11)
    (output,) = llm.generate("Once upon a time", params)
    assert [each.index for each in output.outputs] == [0, 1, 2, 3]
    assert all(len(each.token_ids) == 6 for each in output.outputs)
    assert len({tuple(each.token_ids) for each in output.outputs}) > 1
    (again,) = llm.generate("Once upon a time", params)
    assert [each.token_ids for each in again.outputs] == [each.token_ids for each in output.outputs]


if __name__ == "__main__":
    main()
