"""Two adapters and the model itself, in one batch."""

import os

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256, enable_lora=True, max_loras=2, max_lora_rank=8)
    first = LoRARequest("first", 1, os.environ["ADAPTER_1"])
    second = LoRARequest("second", 2, os.environ["ADAPTER_2"])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = ["27 + 58 ="] * 3
    outputs = llm.generate(prompts, params, lora_request=[None, first, second])
    ids = [output.outputs[0].token_ids for output in outputs]
    assert ids[0] != ids[1] != ids[2] != ids[0]
    assert outputs[0].outputs[0].text.lstrip().startswith("85")
    alone = [llm.generate("27 + 58 =", params, lora_request=each)[0] for each in (None, first, second)]
    assert [output.outputs[0].token_ids for output in alone] == ids
    assert (first.adapter_id, first.name, first.path) == (1, "first", os.environ["ADAPTER_1"])
    assert [output.lora_request for output in alone] == [None, first, second]


if __name__ == "__main__":
    main()
