"""The same seed, the same output."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)

    def sample(seed):
        params = SamplingParams(temperature=2.0, seed=seed, max_tokens=12, ignore_eos=True)
        return llm.generate(["27 + 58 ="], params)[0].outputs[0].token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


if __name__ == "__main__":
    main()
