"""What ends an output."""

import os

from vllm import LLM, SamplingParams
from vllm.sampling_params import RepetitionDetectionParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)
    prompt = "27 + 58 ="
    common = {"temperature": 0, "max_tokens": 8}
    by_text = llm.generate(prompt, SamplingParams(stop=["5"], **common))[0].outputs[0]
    assert (by_text.text, by_text.stop_reason, by_text.finish_reason) == (" 8", "5", "stop")
    kept = llm.generate(prompt, SamplingParams(stop="5", include_stop_str_in_output=True, **common))[0].outputs[0]
    assert kept.text == " 85"
    last = by_text.token_ids[-1]
    by_token = llm.generate(prompt, SamplingParams(stop_token_ids=[last], **common))[0].outputs[0]
    assert by_token.stop_reason == last
    longer = llm.generate(prompt, SamplingParams(min_tokens=6, **common))[0].outputs[0]
    assert len(longer.token_ids) >= 6
    twice = RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    again = llm.generate(prompt, SamplingParams(allowed_token_ids=[last], repetition_detection=twice, **common))[0]
    ended = again.outputs[0]
    assert (list(ended.token_ids), ended.finish_reason) == ([last] * 3, "repetition")
    assert ended.stop_reason == "repetition_detected"


if __name__ == "__main__":
    main()
