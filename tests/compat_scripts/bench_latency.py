"""The command that measures how long a batch takes."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    result = Path(folder) / "result.json"
    flags = ["--input-len", "8", "--output-len", "4", "--batch-size", "2", "--num-iters-warmup", "1"]
    more = ["--num-iters", "2", "--max-model-len", "64", "--output-json", str(result)]
    subprocess.run(["vllm", "bench", "latency", "--model", os.environ["MODEL"], *flags, *more], check=True, timeout=600)
    found = json.loads(result.read_text())
    assert found["avg_latency"] > 0
    assert len(found["latencies"]) == 2
    assert set(found["percentiles"]) >= {"50", "99"}
