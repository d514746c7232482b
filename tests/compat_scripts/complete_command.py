"""The commands that ask a server."""

import subprocess

from servers import serving

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

with serving("--chat-template", TEMPLATE) as (url, client):
    for command in (["complete", "--max-tokens", "8"], ["chat"]):
        asked = ["vllm", *command, "--url", f"{url}/v1", "--quick", "27 + 58 ="]
        done = subprocess.run(asked, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
        assert done.stdout
