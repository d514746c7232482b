"""Weights that the script changes on the workers, as training does."""

import os

from vllm import LLM, SamplingParams


def total_of_weights(worker):
    return sum(float(each.float().sum()) for each in worker.get_model().parameters())


def scale_embeddings(worker, factor):
    name, parameter = next(iter(worker.get_model().named_parameters()))
    parameter.data.mul_(factor)
    return name


def main():
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate("27 + 58 =", params)[0].outputs[0].text
    (total,) = llm.collective_rpc(total_of_weights)
    (name,) = llm.collective_rpc(scale_embeddings, args=(0.0,))
    assert name
    assert llm.collective_rpc(total_of_weights) != [total]
    llm.reset_prefix_cache()
    assert llm.generate("27 + 58 =", params)[0].outputs[0].text != before


if __name__ == "__main__":
    main()
