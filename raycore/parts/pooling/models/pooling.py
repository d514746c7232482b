"""How a model that pools turns the final hidden states of a prompt into one result, or one for each token.

The steps are: *pooling* takes some of the hidden states, or their mean; a *head*, a list of parts, computes an
embedding or the logits of classes from that; at last comes an *activation*, such as normalization. Does not import
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import msgspec

from raycore.parts.pooling.models.late_interaction import LateInteraction
from raycore.pooling_params import InputType, PoolingTask

SequencePooling = Literal["LAST", "MEAN", "CLS"]
"""What one result is computed from: the last token's hidden state, the mean of all, or the first token's."""
TokenPooling = Literal["ALL", "STEP"]
"""Which tokens get a result each: all, or those that have the id `step_tag_id`."""
ActivationName = Literal["tanh", "relu", "gelu", "gelu_tanh", "silu", "sigmoid"]
Normalization = Literal["normalize", "softmax", "sigmoid", "tanh", "none"]
"""The activation at the end. `normalize` divides by the Euclidean norm."""


class HeadLinear(msgspec.Struct, frozen=True, tag="linear"):
    """A linear layer."""

    weight: str
    """Name of a tensor [num_outputs, num_inputs]."""
    num_outputs: int
    num_inputs: int
    bias: str | None = None
    folder: str = ""
    """Below the checkpoint's directory: where the tensors' files are."""


class HeadNorm(msgspec.Struct, frozen=True, tag="norm"):
    """A layer norm."""

    weight: str
    size: int
    eps: float = 1e-5
    bias: str | None = None
    folder: str = ""


class HeadActivation(msgspec.Struct, frozen=True, tag="activation"):
    """An activation between two parts."""

    name: ActivationName


class HeadRows(msgspec.Struct, frozen=True, tag="rows"):
    """A linear layer whose rows are those of tokens in the head, or the embedding, of a model that generates."""

    table: Literal["embedding", "head"]
    vocab_size: int
    num_inputs: int
    tokens: list[int]
    """The tokens whose rows are taken."""
    is_difference: bool = False
    """Whether the only row is the second token's minus the first one's. Its sigmoid is the second one's probability in
    the softmax of both."""

    @property
    def num_outputs(self) -> int:
        return 1 if self.is_difference else len(self.tokens)


HeadPart = HeadLinear | HeadNorm | HeadActivation | HeadRows


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a model that pools can be asked for, and how it computes that."""

    tasks: list[PoolingTask]
    """The first one is the default."""
    sequence: SequencePooling = "LAST"
    token: TokenPooling = "ALL"
    embed: list[HeadPart] = []
    """The head of `embed` and `token_embed`."""
    classify: list[HeadPart] = []
    """The head of `classify` and `score`."""
    token_classify: list[HeadPart] = []
    """The head of `token_classify`."""
    embedding_size: int
    """Number of elements of an embedding."""
    use_activation: bool = True
    """What `PoolingParams.use_activation` is by default."""
    class_activation: Normalization = "softmax"
    """What makes probabilities or scores of the logits of `classify` and `score`."""
    token_class_activation: Normalization = "softmax"
    num_labels: int = 0
    labels: list[str] = []
    """The names of the classes. Empty: they have none."""
    logit_mean: float | None = None
    """Subtracted from logits before the activation."""
    logit_sigma: float | None = None
    """Logits are divided by it after that."""
    dimensions: int | None = None
    """What `PoolingParams.dimensions` is by default."""
    is_matryoshka: bool = False
    """Whether the first elements of an embedding are an embedding, too."""
    matryoshka_dimensions: list[int] | None = None
    """How many elements may be kept. None: any number."""
    step_tag_id: int | None = None
    """What `PoolingParams.step_tag_id` is by default."""
    returned_token_ids: list[int] | None = None
    """What `PoolingParams.returned_token_ids` is by default."""
    pairs: Literal["pair", "text"] = "text"
    """How two texts become a prompt for `score`. pair: as the tokenizer joins pairs. text: one after the other."""
    max_length: int | None = None
    """Maximum number of tokens of a prompt, if that is less than the model's."""
    late: LateInteraction | None = None
    """What the model wants of queries and documents. None: it treats all texts alike."""

    def head(self, task: PoolingTask) -> list[HeadPart]:
        """Return the parts of the head for a task."""
        if task in ("embed", "token_embed"):
            return self.embed
        return self.token_classify if task == "token_classify" else self.classify

    def activation(self, task: PoolingTask) -> Normalization:
        """Return the activation at the end of a task, if there is one."""
        if task in ("embed", "token_embed"):
            return "normalize"
        return self.token_class_activation if task == "token_classify" else self.class_activation

    @property
    def kinds(self) -> tuple[InputType | None, InputType | None]:
        """What the first and the second text of a pair are."""
        return (None, None) if self.late is None else ("query", "document")

    def prompt(
        self, token_ids: list[int], kind: InputType | None, *, max_length: int | None = None, is_text: bool = False
    ) -> list[int]:
        """Return the prompt of a text's tokens.

        Args:
            kind: what it is. None: a document, if that matters to the model.
            max_length: the most tokens of a document that the model cuts. None: as many as the model says.
            is_text: whether a tokenizer made the tokens of a text. If not, they may be a prompt already.

        Raises:
            InvalidRequest: the model takes no prompt of one token.
        """
        if self.late is None:
            return token_ids
        return self.late.tokens(token_ids, kind or "document", max_length=max_length, is_text=is_text)

    def is_per_token(self, task: PoolingTask) -> bool:
        """Whether a task has a result for each token."""
        return task in ("token_embed", "token_classify")

    def needs_all_tokens(self, task: PoolingTask) -> bool:
        """Whether a task takes hidden states of other tokens than the prompt's last one.

        A prefix that is cached has none.
        """
        return self.is_per_token(task) or self.sequence != "LAST"

    def with_biases(self, has_tensor: Callable[[str], bool]) -> PoolingSpec:
        """Return the same with those biases of linear layers that the checkpoint's own files have."""

        def fitted(parts: list[HeadPart]) -> list[HeadPart]:
            return [_with_bias(part, has_tensor) for part in parts]

        return msgspec.structs.replace(
            self,
            embed=fitted(self.embed),
            classify=fitted(self.classify),
            token_classify=fitted(self.token_classify),
        )

    def own_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the heads' tensors in the checkpoint's own files."""
        found: dict[str, tuple[int, ...]] = {}
        for part in [*self.embed, *self.classify, *self.token_classify]:
            if isinstance(part, HeadLinear) and not part.folder:
                found[part.weight] = (part.num_outputs, part.num_inputs)
                found |= {} if part.bias is None else {part.bias: (part.num_outputs,)}
            elif isinstance(part, HeadNorm) and not part.folder:
                found[part.weight] = (part.size,)
                found |= {} if part.bias is None else {part.bias: (part.size,)}
        return found

    def widest(self, hidden_size: int) -> int:
        """Return the largest number of elements of a row on its way through a head."""
        parts = [*self.embed, *self.classify, *self.token_classify]
        sizes = [part.num_outputs for part in parts if isinstance(part, HeadLinear | HeadRows)]
        return max([hidden_size, *sizes])

    @property
    def class_tokens(self) -> list[int] | None:
        """The tokens that are the classes, if a head has a row for each of them. None: classes aren't tokens."""
        rows = [part for part in self.token_classify if isinstance(part, HeadRows) and not part.is_difference]
        return rows[0].tokens if rows else None

    @property
    def uses_head_rows(self) -> bool:
        """Whether a head is made of rows of the head of a model that generates."""
        parts = [*self.classify, *self.token_classify]
        return any(isinstance(part, HeadRows) and part.table == "head" for part in parts)


def _with_bias(part: HeadPart, has_tensor: Callable[[str], bool]) -> HeadPart:
    if not isinstance(part, HeadLinear) or part.folder:
        return part
    bias = part.weight.removesuffix("weight") + "bias"
    return msgspec.structs.replace(part, bias=bias if has_tensor(bias) else None)


class SentenceModules(NamedTuple):
    """The modules after the transformer, of a checkpoint of sentence-transformers."""

    pooling: SequencePooling | None
    """None: no module pools, so each token has a result."""
    head: list[HeadPart]
    is_normalized: bool
    embedding_size: int | None
    """Number of outputs of the last linear layer. None: there is none."""


class PoolingFiles(Protocol):
    """The files of a checkpoint that say how it pools.

    Raises InvalidCheckpoint if a file is damaged, or there is a module that raycore doesn't know.
    """

    def modules(self) -> SentenceModules | None:
        """Return the modules after the transformer. None: no file names them."""

    def max_length(self) -> int | None:
        """Return the maximum number of tokens of a text. None: no file names it."""
