"""A function of the model, on each worker."""

import os

from vllm import LLM


def number_of_parameters(model):
    return sum(each.numel() for each in model.parameters())


def main():
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)
    (count,) = llm.apply_model(number_of_parameters)
    assert 500_000 < count < 2_000_000


if __name__ == "__main__":
    main()
