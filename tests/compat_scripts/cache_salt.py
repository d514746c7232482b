"""Prompts with different salts share nothing."""

import os

from vllm import LLM, SamplingParams, TokensPrompt


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=512, enable_prefix_caching=True, block_size=32)
    params = SamplingParams(temperature=0, max_tokens=2)
    ids = llm.get_tokenizer().encode("11 + 12 = 23\n40 - 15 = 25\n60 + 31 = 91\n52 - 21 = 31\n27 + 58 =")
    cached = []
    for salt in ("a", "b", "a"):
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=ids, cache_salt=salt), params)
        assert output.prompt_token_ids == ids
        cached.append(output.num_cached_tokens or 0)
    assert cached[:2] == [0, 0]
    assert cached[2] >= 16


if __name__ == "__main__":
    main()
