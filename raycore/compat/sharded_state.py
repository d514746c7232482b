"""The patterns of the names of files that `save_sharded_state()` writes, where vLLM has them."""

from __future__ import annotations

from raycore.checkpoint.sharded_state import PATTERN, STAGES_PATTERN


class ShardedStateLoader:
    """Has the patterns. raycore reads such files by `load_format="sharded_state"`."""

    DEFAULT_PATTERN = TP_ONLY_PATTERN = PATTERN
    PP_AND_TP_PATTERN = STAGES_PATTERN
