"""Why raycore lacks names of vLLM's, or differs, where the code itself doesn't say."""

from __future__ import annotations

REASONS: dict[str, str] = {}
