"""Beam search over an engine's requests: each token of each beam is a request of its own.

A step asks for the log probabilities of one token after each beam. The prefix cache has the keys and values of a beam's
tokens, so that only those of its last block are computed again. This module only decides; others send the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from raycore.beam_search import BeamSearchSequence
from raycore.client.ask import Ask
from raycore.client.inputs import checked_beam_params
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer


class BeamSearch:
    """The search for the continuations of one prompt."""

    def __init__(self, ask: Ask, eos_token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
        self._ask = ask
        self._prompt = prompt = ask.parsed
        self._params = params = checked_beam_params(ask.params)
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        # a prompt that is too long is refused when its first request is sent
        self._num_left = max(1, min(params.max_tokens, max_model_len - len(prompt.token_ids)))
        self._longest = len(prompt.token_ids) + self._num_left
        self.step_params = SamplingParams(
            temperature=0,
            max_tokens=1,
            logprobs=min(2 * params.beam_width, vocab_size),
            ignore_eos=True,
            detokenize=False,
        )
        """Of the requests."""
        self._num_steps = 0
        self._beams = [BeamSearchSequence(list(prompt.token_ids), lora_request=ask.lora)]
        """Those that go on, the best one first."""
        self._completed: list[BeamSearchSequence] = []

    @property
    def beam_width(self) -> int:
        """Number of sequences that are followed, and returned."""
        return self._params.beam_width

    @property
    def asks(self) -> list[Ask]:
        """The next step's requests, whose ids begin with that of the search. Empty: the search has ended."""
        if self._num_left == 0:
            return []
        return [
            msgspec.structs.replace(
                self._ask,
                prompt=replace(self._prompt, text=None, token_ids=beam.tokens),
                params=self.step_params,
                request_id=f"{self._ask.request_id}-{self._num_steps}-{index}",
                stream=False,
            )
            for index, beam in enumerate(self._beams)
        ]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Take the results of a step's requests, in order."""
        self._num_left -= 1
        self._num_steps += 1
        if any(output.outputs[0].finish_reason == "abort" for output in outputs):
            self._end("abort")
            return
        found: list[BeamSearchSequence] = []
        for beam, output in zip(self._beams, outputs, strict=True):
            logprobs = output.outputs[0].logprobs
            assert logprobs, "they were asked for"
            for token_id, entry in logprobs[0].items():
                new = replace(
                    beam,
                    tokens=[*beam.tokens, token_id],
                    logprobs=[*beam.logprobs, logprobs[0]],
                    cum_logprob=beam.cum_logprob + entry.logprob,
                )
                if token_id in self._eos:
                    self._completed.append(replace(new, finish_reason="stop", stop_reason=token_id))
                else:
                    found.append(new)
        # all have the same length
        self._beams = sorted(found, key=lambda beam: beam.cum_logprob, reverse=True)[: self._params.beam_width]
        self._completed = self._best(self._completed)
        if self._num_left == 0 or self._is_decided:
            self._end("length")

    def sequences(self, tokenizer: Tokenizer) -> list[BeamSearchSequence]:
        """Return the best sequences, after the end."""
        return [
            replace(each, text=tokenizer.decode(each.tokens, self._params.skip_special_tokens))
            for each in self._completed
        ]

    def output(self, tokenizer: Tokenizer) -> RequestOutput:
        """Return the best sequences as the output of a request, without the prompt."""
        first, params = len(self._prompt.token_ids), self._params
        outputs: list[CompletionOutput] = []
        for index, each in enumerate(self._completed):
            is_cut = each.finish_reason == "stop" and not params.include_stop_str_in_output
            kept = each.tokens[first : len(each.tokens) - is_cut]
            outputs.append(
                CompletionOutput(
                    index,
                    tokenizer.decode(kept, params.skip_special_tokens),
                    kept,
                    each.cum_logprob,
                    each.logprobs[: len(kept)],
                    finish_reason=each.finish_reason,
                    stop_reason=each.stop_reason,
                )
            )
        prompt = self._prompt
        return RequestOutput(self._ask.request_id, prompt.text, prompt.token_ids, outputs=outputs, finished=True)

    def _end(self, reason: str) -> None:
        running = [replace(beam, finish_reason=reason) for beam in self._beams]
        self._completed = self._best([*self._completed, *running])
        self._beams, self._num_left = [], 0

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, sequence: BeamSearchSequence) -> float:
        return self._scored(sequence.cum_logprob, len(sequence.tokens) - (sequence.tokens[-1] in self._eos))

    def _scored(self, cum_logprob: float, length: int) -> float:
        return cum_logprob / max(length, 1) ** self._params.length_penalty

    @property
    def _is_decided(self) -> bool:
        """Whether no beam can become better than all that are returned. Its log probability only falls."""
        if not self._beams:
            return True
        if len(self._completed) < self._params.beam_width:
            return False
        best, length = self._beams[0], len(self._beams[0].tokens)
        reachable = max(self._scored(best.cum_logprob, each) for each in (length, self._longest))
        return self._score(self._completed[-1]) >= reachable
