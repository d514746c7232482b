"""Tokens that are preferred, allowed or forbidden."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)
    common = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    plain = llm.generate("27 + 58 =", SamplingParams(**common))[0].outputs[0].token_ids
    biased = llm.generate("27 + 58 =", SamplingParams(logit_bias={45: 100.0}, **common))[0].outputs[0]
    assert list(biased.token_ids) == [45] * 4
    allowed = llm.generate("27 + 58 =", SamplingParams(allowed_token_ids=[45, 46], **common))[0].outputs[0]
    assert set(allowed.token_ids) <= {45, 46}
    forbidden = llm.generate("27 + 58 =", SamplingParams(bad_words=["85"], **common))[0].outputs[0]
    assert "85" not in forbidden.text
    assert forbidden.token_ids != plain


if __name__ == "__main__":
    main()
