"""Two ranks that share the requests."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256, data_parallel_size=2, distributed_executor_backend="ray")
    prompts = [f"{number} + 11 =" for number in range(20, 36)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert [output.outputs[0].text.strip() for output in outputs] == [str(number + 11) for number in range(20, 36)]


if __name__ == "__main__":
    main()
