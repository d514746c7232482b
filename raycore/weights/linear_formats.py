"""Which linear layers get quantized weights."""

from __future__ import annotations

from dataclasses import dataclass

from raycore.models.quantization import Format, WeightScheme


@dataclass(frozen=True)
class LinearFormats:
    """The formats of linear layers' weights. Those that have none get the model's dtype.

    Embeddings and routers get the model's dtype in any case. The head keeps the integers of a GGUF file, and with it an
    embedding that is the same tensor. All other heads are converted.
    """

    stored: frozenset[Format] = frozenset()
    """Weights that the checkpoint stores in these formats keep them."""
    others: Format | None = None
    """The format of all other weights, which are quantized while they are read. Integers have 8 bits, and so have those
    to which the layers' inputs are rounded."""
    short_rows: bool = False
    """Whether the inputs of layers with stored integers are rounded to 8 bits, each group of them with a scale of its
    own."""
    groups_fp8: bool = False
    """Whether stored weights in fp8 have a scale for each group of inputs, as CPUs multiply them, instead of one for
    each output."""

    def packs(self, scheme: WeightScheme | None) -> bool:
        """Whether weights that are stored like this become an `IntegerWeight`."""
        if scheme is None or scheme.format not in self.stored:
            return False
        return scheme.format == "integers" or self.groups_fp8


CONVERTED = LinearFormats()
"""All weights get the model's dtype."""
STORED_FP8 = LinearFormats(frozenset(["fp8"]))
STORED_INTEGERS = LinearFormats(frozenset(["integers"]))
GROUPED_FP8 = LinearFormats(frozenset(["fp8", "fp8_blocks"]), groups_fp8=True)
EVERY_FP8 = LinearFormats(frozenset(["fp8"]), "fp8")
EVERY_INTEGERS = LinearFormats(frozenset(["integers"]), "integers")
