"""Two workers that share the model."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(os.environ["MODEL"], tensor_parallel_size=2, max_model_len=256, distributed_executor_backend="ray")
    (output,) = llm.generate("27 + 58 =", SamplingParams(temperature=0, max_tokens=8))
    assert output.outputs[0].text.strip() == "85"


if __name__ == "__main__":
    main()
