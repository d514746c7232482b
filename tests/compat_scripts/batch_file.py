"""A file of requests, answered by a command."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    source, target = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
    lines = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": os.environ["MODEL"],
                "messages": [{"role": "user", "content": f"{number} + 11 ="}],
                "max_completion_tokens": 8,
                "temperature": 0,
            },
        }
        for number in range(20, 24)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    module = [sys.executable, "-m", "vllm.entrypoints.openai.run_batch"]
    flags = ["-i", str(source), "-o", str(target), "--model", os.environ["MODEL"], "--max-model-len", "256"]
    subprocess.run([*module, *flags], check=True, timeout=600)
    answers = {each["custom_id"]: each["response"] for each in map(json.loads, target.read_text().splitlines())}
    assert len(answers) == 4
    for number in range(20, 24):
        body = answers[f"request-{number}"]["body"]
        assert body["choices"][0]["message"]["role"] == "assistant"
        assert 0 < body["usage"]["completion_tokens"] <= 8
