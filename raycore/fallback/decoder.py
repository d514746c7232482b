"""A decoder that transformers' modelling code computes, with raycore's attention, linear layers and norms in it.

Letters of shapes: T tokens of the step, R those of the T rows that are kept, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raycore.attention.spec import Attention, MixerConstants
from raycore.checkpoint.stages import Stage
from raycore.decoder.network import NO_TAPS, FollowsPlans, Network, RunLayers, Taps
from raycore.errors import InvalidCheckpoint
from raycore.fallback.description import check_calls
from raycore.fallback.interface import PagedCalls, answer_with
from raycore.fallback.library import library
from raycore.fallback.linears import adaptable
from raycore.fallback.modules import Replacements
from raycore.fallback.networks import check_modules
from raycore.fallback.plan import plan_of
from raycore.fallback.self_test import SelfTest
from raycore.fallback.trace import AttentionCall, Trace, Unsupported, trace
from raycore.layers.operations import Operations
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.adapters.layers import Adapters
from raycore.parts.experts.parallel import ExpertRanks
from raycore.profile_session import ProfiledParts
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors

logger = logging.getLogger(__name__)


class TransformersDecoder(Network):
    """One tensor-parallel rank's part of a network of transformers. Its vocabulary is itself."""

    def __init__(
        self,
        spec: ModelSpec,
        network: Any,
        ranks: TensorParallel,
        operations: Operations,
        experts: ExpertRanks | None = None,
        stage: Stage | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """Divide `network`, which has all its weights in the host's memory, replace its layers, and test it.

        `adapters`: change the linear layers of `spec.linears`. None: there are none.

        Raises:
            InvalidCheckpoint: it can't be computed this way. The message says why.
        """
        self.stage = stage or Stage.whole(spec)
        self.vocab_size, self.hidden_size, self.dtype = spec.vocab_size, spec.hidden_size, network.dtype
        self._ranks = ranks
        self._device = operations.device
        self._network = network.requires_grad_(False)
        try:
            self._build(spec, operations, adapters)
        except Unsupported as error:
            raise InvalidCheckpoint(
                f"{spec.architecture} can't be computed by transformers' code in raycore: {error}"
            ) from error

    def _build(self, spec: ModelSpec, operations: Operations, adapters: Adapters | None) -> None:
        network, ranks = self._network, self._ranks
        test = SelfTest(network, spec.vocab_size)
        done = trace(network, spec.max_length)
        check_modules(network, done.called)
        check_calls(done.calls)
        _check_described(spec, done.calls)
        plan = plan_of(network) if ranks.size > 1 else None
        if adapters is not None:
            _check_linears(spec, network, done)
            adapters.rows.clear()  # the test is without adapters
        replacements = Replacements(network, done.called, operations, ranks, plan or {}, adapters, spec.linears)
        replacements.replace()
        self.num_weights = replacements.num_weights
        logger.info(
            "transformers %s's %s computes the model, with raycore's attention and these layers in it: %s",
            *(library().__version__, type(network).__name__, dict(replacements.num_replaced)),
        )
        heads = spec.attentions[0].heads(spec, ranks.size)
        self.num_key_value_numbers = len(done.calls) * 2 * heads.num_kv_heads * heads.head_dim
        own = slice(ranks.rank * heads.num_heads, (ranks.rank + 1) * heads.num_heads)
        sinks_N = (None if call.sinks_N is None else call.sinks_N[own].to(self._device) for call in done.calls)
        self.constants = [MixerConstants(sinks_N=each) for each in sinks_N]
        self._body, self._head = _parts_of(network, done)
        test.check(network, done.calls, ranks, self._compute)
        scale = spec.attention_scale
        assert scale is not None, "the description has it"
        self._calls = PagedCalls(heads, self.dtype, [call.scale / scale for call in done.calls], ranks)
        self._positions_1T = torch.empty(1, 0, dtype=torch.long)
        answer_with(network, self._calls)

    @property
    def vocabulary(self) -> TransformersDecoder:
        return self

    def around(self, attention: Attention) -> tuple[Attention, list[FollowsPlans]]:
        """Return attention that notes the positions of each step's tokens, which the network needs, too."""
        return _Positioned(attention, self), []

    def note_positions(self, positions_T: Tensor) -> None:
        """Remember the positions of the tokens of the step that begins."""
        self._positions_1T = positions_T[None]

    def forward(
        self,
        inputs: Tensor,
        attention: Attention,
        rows_R: Tensor | None = None,
        after_layer: Callable[[], None] = lambda: None,
        taps: Taps = NO_TAPS,
        run_layers: RunLayers | None = None,
    ) -> Tensor:
        """Return the final hidden states [R, D] of tokens [T]. See `Network.forward`."""
        assert not taps, "such drafters are refused"
        assert run_layers is None, "transformers' layers aren't recorded"
        self._calls.begin(attention, after_layer)
        hidden_TD = self._hidden(inputs, self._positions_1T)
        self._calls.end()
        return hidden_TD if rows_R is None else hidden_TD.index_select(0, rows_R)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        return self._head(input_ids=None, inputs_embeds=hidden_RD[None], use_cache=False, return_dict=True).logits[0]

    def parts(self) -> ProfiledParts:
        yield self, {"_hidden": "network", "_head": "lm_head"}

    def embed(self, token_ids_T: Tensor) -> Tensor:
        return self._body.get_input_embeddings()(token_ids_T.long()[None])[0]

    def _hidden(self, inputs: Tensor, positions_1T: Tensor) -> Tensor:
        """`inputs`: tokens [T] or their embeddings [T, D]."""
        given = {"input_ids": inputs.long()[None]} if inputs.dim() == 1 else {"inputs_embeds": inputs[None]}
        return self._body(**given, position_ids=positions_1T, use_cache=False, return_dict=True).last_hidden_state[0]

    def _compute(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        device = self._device
        return self.logits(self._hidden(token_ids_T.to(device), positions_T.to(device)[None]))


class _Positioned:
    """Attention that tells a decoder the positions of a step's tokens."""

    def __init__(self, attention: Attention, decoder: TransformersDecoder) -> None:
        self._attention = attention
        self._decoder = decoder

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`."""
        self._decoder.note_positions(tensors.positions_T)
        self._attention.begin(step, tensors)

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Compute attention in one layer. Returns [T, query heads · H]."""
        return self._attention(layer, qkv_TO)


class _Output(tuple[Tensor]):
    """What the part before the head returns: hidden states, and nothing of all else that there may be."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands for the part of a network before the head: returns the hidden states that it gets."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return _Output((inputs_embeds,))


def _parts_of(network: Any, done: Trace) -> tuple[Any, Any]:
    """Return what computes hidden states, and what computes logits from them, by the network's own rules."""
    attending = {call.module for call in done.calls}
    found = [module for module in done.outer if attending <= set(module.modules())]
    if len(found) != 1:
        raise Unsupported("transformers doesn't separate its head from the rest")
    (name,) = [name for name, module in network.named_modules() if module is found[0]]
    head = each = _shallow_copy(network)
    *path, last = name.split(".")
    for part in path:
        inner = _shallow_copy(getattr(each, part))
        setattr(each, part, inner)
        each = inner
    setattr(each, last, _Given(found[0].config))
    return found[0], head


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module with the same modules in it."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)  # pyright: ignore[reportPrivateUsage]
    return copied


def _check_described(spec: ModelSpec, calls: list[AttentionCall]) -> None:
    """Raise Unsupported if the network asks for something else than the driver has found out without weights."""
    first = calls[0]
    found = first.num_heads, first.num_kv_heads, max(call.head_dim for call in calls), first.softcap
    described = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_softcap
    if found != described or [call.window for call in calls] != spec.layer_windows:
        raise Unsupported(
            f"with weights, it asks for other attention ({len(calls)} calls, {found}) than without "
            f"({spec.num_layers} calls, {described})"
        )


def _check_linears(spec: ModelSpec, network: Any, done: Trace) -> None:
    """Raise Unsupported if adapters can't change what the driver has found out without weights."""
    found = adaptable(network, done)
    for name, shape in spec.linears.items():
        if found.get(name) != shape:
            raise Unsupported(f"with weights, its {name} isn't called like without, so adapters can't change it")
        if network.get_submodule(name).weight.dtype != network.dtype:
            raise Unsupported(f"its {name} isn't computed in {network.dtype}, so adapters can't change it")
