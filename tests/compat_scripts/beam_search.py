"""The most likely outputs of a prompt."""

import os

from vllm import LLM
from vllm.sampling_params import BeamSearchParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256, max_logprobs=20)
    prompts = [{"prompt": "27 + 58 ="}, {"prompt": "11 + 12 ="}]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=3))
    for output, answer in zip(outputs, ("85", "23"), strict=True):
        assert len(output.sequences) == 3
        scores = [each.cum_logprob for each in output.sequences]
        assert scores == sorted(scores, reverse=True)
        assert answer in output.sequences[0].text


if __name__ == "__main__":
    main()
