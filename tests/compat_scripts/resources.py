"""The small functions of vLLM's that scripts use."""

import os

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.tokenizers import get_tokenizer
from vllm.utils.network_utils import get_ip, get_open_port
from vllm.version import __version__

logger = init_logger(__name__)


def main():
    assert current_platform.is_cpu() or current_platform.is_cuda()
    assert current_platform.device_type in ("cpu", "cuda")
    assert 1024 <= get_open_port() < 65536
    assert get_ip().count(".") == 3
    tokenizer = get_tokenizer(os.environ["MODEL"])
    assert tokenizer.decode(tokenizer.encode("27 + 58 =")) == "27 + 58 ="
    assert __version__.startswith("0.32")
    logger.warning_once("said once")
    logger.warning_once("said once")


if __name__ == "__main__":
    main()
