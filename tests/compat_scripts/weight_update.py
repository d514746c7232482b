"""New weights in the checkpoint's files, read by an engine that sleeps meanwhile."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams


def main():
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(os.environ["MODEL"], model)
        llm = LLM(model=str(model), max_model_len=256, enable_sleep_mode=os.environ.get("SLEEP", "1") == "1")
        params = SamplingParams(temperature=0, max_tokens=8)
        before = llm.generate("27 + 58 =", params)[0].outputs[0].text
        assert before.strip() == "85"
        llm.sleep(level=2)
        file = model / "model.safetensors"
        weights = load_file(file)
        name = "model.layers.0.self_attn.q_proj.weight"
        save_file({**weights, name: torch.zeros_like(weights[name])}, file, {"format": "pt"})
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        assert llm.generate("27 + 58 =", params)[0].outputs[0].text != before


if __name__ == "__main__":
    main()
