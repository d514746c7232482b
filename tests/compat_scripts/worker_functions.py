"""A function of the worker, called on each of them."""

import os

from vllm import LLM


def add(worker, number, other=0):
    return number + other


def main():
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)
    assert llm.collective_rpc(add, args=(2,), kwargs={"other": 3}) == [5]
    assert llm.collective_rpc("check_health", timeout=30) == [None]


if __name__ == "__main__":
    main()
