"""Tokens in, tokens out: the engine loads no tokenizer."""

import os

from vllm import LLM, SamplingParams


def refusal(call, *args):
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    raise AssertionError("it wasn't refused")


def main():
    llm = LLM(os.environ["MODEL"], max_model_len=256, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params)
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].text == ""
    assert "skip_tokenizer_init" in refusal(llm.generate, ["27 + 58 ="], params)
    (again,) = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids


if __name__ == "__main__":
    main()
