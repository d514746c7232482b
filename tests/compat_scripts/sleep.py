"""An engine that gives its memory up for a while."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256, enable_sleep_mode=os.environ.get("SLEEP", "1") == "1")
    params = SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate("27 + 58 =", params)[0].outputs[0].text
    llm.sleep(level=1)
    llm.wake_up()
    assert llm.generate("27 + 58 =", params)[0].outputs[0].text == before
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    assert llm.generate("27 + 58 =", params)[0].outputs[0].text == before


if __name__ == "__main__":
    main()
