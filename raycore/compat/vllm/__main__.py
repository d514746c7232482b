"""`python -m raycore.compat.vllm`: runs scripts that import vLLM, and vLLM's commands."""

import sys

from raycore.compat.run import main

sys.exit(main(sys.argv[1:]))
