"""The command that measures a server."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from servers import serving

with serving() as (url, client), tempfile.TemporaryDirectory() as folder:
    where = ["--base-url", url, "--model", "demo", "--tokenizer", os.environ["MODEL"], "--ignore-eos"]
    load = ["--dataset-name", "random", "--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "6"]
    kept = ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
    subprocess.run(["vllm", "bench", "serve", *where, *load, *kept], check=True, timeout=600)
    found = json.loads((Path(folder) / "result.json").read_text())
    assert found["completed"] == 6
    assert found["total_output_tokens"] == 24
    assert found["mean_ttft_ms"] > 0
