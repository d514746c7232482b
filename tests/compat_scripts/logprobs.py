"""Log probabilities of generated tokens and of the prompt's."""

import math
import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256, max_logprobs=10)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate(["27 + 58 ="], params)
    completion = output.outputs[0]
    total = 0.0
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert 3 <= len(position) <= 4
        assert position[token_id].rank == 1
        assert position[token_id].logprob == max(each.logprob for each in position.values())
        assert position[token_id].decoded_token
        total += position[token_id].logprob
    assert math.isclose(completion.cumulative_logprob, total, rel_tol=1e-6)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert token_id in position


if __name__ == "__main__":
    main()
