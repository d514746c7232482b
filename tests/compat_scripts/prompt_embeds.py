"""A prompt that is given as embeddings of its tokens."""

import os

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams


def main():
    model = os.environ["MODEL"]
    llm = LLM(model=model, max_model_len=256, enable_prompt_embeds=True)
    weights = load_file(os.path.join(model, "model.safetensors"))
    ids = llm.get_tokenizer().encode("27 + 58 =")
    embeds = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    params = SamplingParams(temperature=0, max_tokens=8)
    (by_embeds,) = llm.generate({"prompt_embeds": embeds}, params)
    (by_text,) = llm.generate("27 + 58 =", params)
    assert by_embeds.outputs[0].token_ids == by_text.outputs[0].token_ids


if __name__ == "__main__":
    main()
