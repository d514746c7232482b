"""A conversation whose answer is one of two."""

import os

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=[" 85", " 86"]))
    messages = [{"role": "user", "content": "27 + 58 ="}]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (output,) = llm.chat(messages, params, chat_template=template)
    assert output.outputs[0].text == " 85"
    assert output.outputs[0].finish_reason == "stop"


if __name__ == "__main__":
    main()
