"""A profile of a few steps."""

import os
import tempfile
import time
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import ProfilerConfig


def main():
    with tempfile.TemporaryDirectory() as folder:
        config = ProfilerConfig(profiler="torch", torch_profiler_dir=folder)
        llm = LLM(model=os.environ["MODEL"], max_model_len=256, profiler_config=config)
        llm.start_profile()
        llm.generate("27 + 58 =", SamplingParams(temperature=0, max_tokens=4))
        llm.stop_profile()
        deadline = time.monotonic() + 30
        while not any(each.stat().st_size for each in Path(folder).rglob("*.json*")):
            assert time.monotonic() < deadline, list(Path(folder).rglob("*"))
            time.sleep(0.2)


if __name__ == "__main__":
    main()
