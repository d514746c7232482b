"""A server that the script starts itself, after it has parsed the flags."""

import asyncio
import contextlib
import os
import signal
import threading
import time
import urllib.request

from openai import OpenAI
from vllm.entrypoints.openai.api_server import run_server
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import get_open_port

answers = []


def ask(port):
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.2)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", timeout=60)
        answers.append(client.completions.create(model="demo", prompt="27 + 58 =", temperature=0).choices[0].text)
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def main():
    parser = make_arg_parser(FlexibleArgumentParser(description="A server"))
    args = parser.parse_args(["--model", os.environ["MODEL"], "--host", "127.0.0.1", "--max-model-len", "256"])
    args.port = get_open_port()
    args.served_model_name = ["demo"]
    validate_parsed_serve_args(args)
    asking = threading.Thread(target=ask, args=(args.port,))
    asking.start()
    asyncio.run(run_server(args))
    asking.join()
    assert answers[0].startswith(" 85")


if __name__ == "__main__":
    main()
