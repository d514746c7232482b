"""The command that measures how many tokens come out of an engine."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    result = Path(folder) / "result.json"
    flags = ["--dataset-name", "random", "--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "4"]
    more = ["--max-model-len", "64", "--output-json", str(result)]
    subprocess.run(
        ["vllm", "bench", "throughput", "--model", os.environ["MODEL"], *flags, *more], check=True, timeout=600
    )
    found = json.loads(result.read_text())
    assert found["num_requests"] == 4
    assert found["tokens_per_second"] > 0
