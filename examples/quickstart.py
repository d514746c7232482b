"""Generate text with the bundled model, or with a checkpoint of your own: `python examples/quickstart.py [DIR]`."""

import sys

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path

if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else demo_model_path()
    with LLM(model) as llm:
        for output in llm.generate(["27 + 58 =", "431 - 87 ="], SamplingParams(temperature=0, max_tokens=16)):
            print(output.prompt, output.outputs[0].text)
