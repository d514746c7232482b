"""Makes the outputs of a request what its `output_kind` and `stream_interval` ask for. Pure.

Deltas are made where a caller takes an output, from the whole output so far: what is new since the output that this
caller took before. So a slow caller misses outputs, but nothing of what they contain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raycore.outputs import CompletionOutput, RequestOutput
from raycore.sampling_params import RequestOutputKind, SamplingParams


@dataclass(slots=True)
class _Taken:
    """What a caller has taken of one sequence."""

    num_tokens: int = 0
    num_characters: int = 0
    num_logprobs: int = 0
    is_finished: bool = False


class OutputKinds:
    """The outputs that one caller takes of one request."""

    def __init__(self, params: SamplingParams, stream_interval: int = 1) -> None:
        self._kind = params.output_kind
        self._interval = stream_interval
        self._taken: dict[int, _Taken] = {}
        self._has_told_prompt = False
        """Whether the caller has got what is said of the prompt."""
        self._num_tokens = 0
        """Number of tokens of all sequences that the caller has taken."""

    @staticmethod
    def of(params: SamplingParams, least_interval: int = 1) -> OutputKinds | None:
        """Return what makes the outputs of a request with these parameters. None: they stay as they are.

        `least_interval`: the engine's option `stream_interval`. The larger one of it and the request's own counts.
        """
        interval = max(params.stream_interval or 1, least_interval)
        is_plain = params.output_kind is RequestOutputKind.CUMULATIVE and interval == 1
        return None if is_plain else OutputKinds(params, interval)

    def take(self, output: RequestOutput) -> RequestOutput | None:
        """Return what the caller gets.

        Args:
            output: the whole output so far. It isn't changed.

        Returns: None: nothing yet, because there is too little that is new.
        """
        if not output.finished:
            num_tokens = sum([len(each.token_ids) for each in output.outputs])
            least = 1 if self._num_tokens == 0 else self._interval
            if self._kind is RequestOutputKind.FINAL_ONLY or num_tokens - self._num_tokens < least:
                return None
            self._num_tokens = num_tokens
        return self._delta(output) if self._kind is RequestOutputKind.DELTA else output

    def _delta(self, output: RequestOutput) -> RequestOutput:
        # what is said of the prompt has come when the first sequence has a token, which may be after the others' tokens
        tells_prompt = not self._has_told_prompt and (output.finished or bool(output.outputs[0].token_ids))
        self._has_told_prompt |= tells_prompt
        new = [self._new(each) for each in output.outputs]
        return replace(
            output,
            outputs=[each for each in new if each is not None],
            prompt_logprobs=output.prompt_logprobs if tells_prompt else None,
            prompt_hidden_states=output.prompt_hidden_states if tells_prompt else None,
        )

    def _new(self, whole: CompletionOutput) -> CompletionOutput | None:
        """What is new of a sequence. None: nothing."""
        taken = self._taken.setdefault(whole.index, _Taken())
        if taken.is_finished or (len(whole.token_ids) == taken.num_tokens and whole.finish_reason is None):
            return None
        delta = replace(
            whole,
            text=whole.text[taken.num_characters :],
            token_ids=whole.token_ids[taken.num_tokens :],
            logprobs=None if whole.logprobs is None else whole.logprobs[taken.num_logprobs :],
            hidden_states=None if whole.hidden_states is None else whole.hidden_states[taken.num_tokens :],
        )
        taken.num_characters, taken.num_tokens = len(whole.text), len(whole.token_ids)
        taken.num_logprobs = 0 if whole.logprobs is None else len(whole.logprobs)
        taken.is_finished = whole.finish_reason is not None
        return delta
