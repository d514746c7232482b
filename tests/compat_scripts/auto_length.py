"""The longest sequences that the cache's memory holds."""

import os

from vllm import LLM, SamplingParams


def main():
    whole = LLM(os.environ["MODEL"], max_model_len="auto", kv_cache_memory_bytes=256 << 20, block_size=16)
    longest = whole.llm_engine.model_config.max_model_len
    del whole
    llm = LLM(os.environ["MODEL"], max_model_len="auto", kv_cache_memory_bytes=1 << 20, block_size=16)
    length = llm.llm_engine.model_config.max_model_len
    assert 0 < length < longest, (length, longest)
    params = SamplingParams(temperature=0, max_tokens=longest, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params)
    assert len(output.outputs[0].token_ids) == length - 4
    try:
        llm.generate([{"prompt_token_ids": [5] * length}], params)
    except ValueError as error:
        message = str(error)
    assert str(length) in message


if __name__ == "__main__":
    main()
