"""The texts that a constraint allows."""

import numpy as np
from fake_engine import END_OF_TEXT

from raycore.demo import demo_model_path
from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.text.tokenizer import Tokenizer


def fits(asked, text, tokenizer_dir=demo_model_path()):  # noqa: B008
    """Whether the model may write all of the text, and nothing else."""
    tokens = Tokenizer.from_dir(tokenizer_dir)
    matcher = GrammarCompiler(str(tokenizer_dir), tokens.vocab_size, [END_OF_TEXT]).matcher(asked)
    try:
        return bool(matcher.allowed_after(np.array(tokens.encode(text, False), np.int32))[END_OF_TEXT])
    except InvalidRequest:
        return False
