"""`python -m raycore` is the `raycore` command."""

import sys

from raycore.cli.main import main

sys.exit(main())
