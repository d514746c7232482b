"""Token ids in, token ids out."""

import os

from vllm import LLM, SamplingParams
from vllm.inputs import TextPrompt, TokensPrompt


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("27 + 58 =")
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids), TextPrompt(prompt="27 + 58 =")], params)
    first, second = (output.outputs[0] for output in outputs)
    assert first.token_ids == second.token_ids
    assert first.text == ""
    assert outputs[0].prompt_token_ids == ids
    assert tokenizer.decode(list(first.token_ids), skip_special_tokens=True).strip() == "85"


if __name__ == "__main__":
    main()
