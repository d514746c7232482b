"""Starts a server for a script, waits until it is healthy, and ends it."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request

from openai import OpenAI

START_TIMEOUT_S = 300


@contextlib.contextmanager
def serving(*flags, command=("vllm", "serve")):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = [os.environ["MODEL"]] if command[-1] == "serve" else ["--model", os.environ["MODEL"]]
    options = ["--served-model-name", "demo", "--max-model-len", "512", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen([*command, *model, *options, *flags])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            assert process.poll() is None, f"the server ended with status {process.returncode}"
            assert time.monotonic() < deadline, "the server doesn't answer"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            time.sleep(0.2)
        yield url, OpenAI(base_url=f"{url}/v1", api_key="EMPTY", timeout=60)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
