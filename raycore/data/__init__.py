"""raycore in Ray Data's pipelines, with the fields and columns of `ray.data.llm`.

::

    processor = build_processor(ProcessorConfig(model_source="path/to/checkpoint", concurrency=2))
    dataset = processor(ray.data.from_items([{"prompt": "27 + 58 ="}]))

Needs the extra `data`. `ray.data.llm.build_processor` takes these configurations, too.
"""

from raycore.data.config import (
    ChatTemplateStageConfig,
    DetokenizeStageConfig,
    PrepareMultimodalStageConfig,
    ProcessorConfig,
    TokenizerStageConfig,
)
from raycore.data.processor import Processor, build_processor, register

__all__ = [
    "ChatTemplateStageConfig",
    "DetokenizeStageConfig",
    "PrepareMultimodalStageConfig",
    "Processor",
    "ProcessorConfig",
    "TokenizerStageConfig",
    "build_processor",
]

register()
