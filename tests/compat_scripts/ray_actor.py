"""An engine in an actor of the script's own."""

import os

import ray
from vllm import SamplingParams


@ray.remote(num_cpus=0)
class Generator:
    def __init__(self, model):
        from vllm import LLM

        self.llm = LLM(model=model, max_model_len=256)

    def generate(self, prompt, params):
        import vllm

        assert isinstance(params, vllm.SamplingParams)
        return self.llm.generate(prompt, params)


def main():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    actor = Generator.remote(os.environ["MODEL"])
    (output,) = ray.get(actor.generate.remote("27 + 58 =", SamplingParams(temperature=0, max_tokens=8)), timeout=120)
    assert output.outputs[0].text.strip() == "85"
    ray.kill(actor)
    ray.shutdown()


if __name__ == "__main__":
    main()
