"""Reasoning is unconstrained, and the constraint begins right after it, whichever tokens spell its end."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from raycore.demo import demo_model_path
from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.tokenizer_files import read_tokenizer_files

VOCAB = 352
"""More than the tokenizers know, as models have it."""
EOS = [0, 3]
TAG = "</think>"
CALL = "<tool_call>"
CALLS = f'start: "{CALL}" /[0-9]+/ | /[a-z]*/'


def tokenizer_with(folder: Path, *added: str, special: bool = False) -> str:
    """The demo model's, with more tokens: as one that was trained on these texts has them."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo_model_path()) / name, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    for token_id, text in enumerate(added, 320):
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        content["added_tokens"].append({"id": token_id, "content": text, "special": special, **plain})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


class Model:
    """A model's tokenizer and what its outputs are held to."""

    def __init__(self, tokenizer_dir: str, vocab_size: int = VOCAB) -> None:
        self.native = read_tokenizer_files(Path(tokenizer_dir)).native
        self.compiler = GrammarCompiler(tokenizer_dir, vocab_size, EOS)

    def ids_of(self, text: str) -> list[int]:
        return self.native.encode(text, add_special_tokens=False).ids

    def matcher(self, **asked):
        return self.compiler.matcher(StructuredOutputsParams(**{"after": TAG, **asked}))

    def allowed_after(self, *parts: str, **asked) -> list[int]:
        """Of an output whose tokens are those of each part."""
        ids = [token_id for part in parts for token_id in self.ids_of(part)]
        return np.flatnonzero(self.matcher(**asked).allowed_after(np.array(ids, np.int32))).tolist()

    def texts_after(self, *parts: str, **asked) -> set[str]:
        allowed = self.allowed_after(*parts, **asked)
        return {self.native.decode([token_id], skip_special_tokens=False) for token_id in allowed}


@pytest.fixture(scope="module")
def spelled() -> Model:
    """A model that has no token for the mark."""
    return Model(demo_model_path())


@pytest.fixture(scope="module", params=[False, True], ids=["plain token", "special token"])
def with_token(request, tmp_path_factory) -> Model:
    return Model(tokenizer_with(tmp_path_factory.mktemp("tokenizer"), TAG, CALL, special=request.param))


def test_the_constraint_begins_after_a_token_that_ends_the_reasoning(with_token):
    for reasoning in ("", "Hm, ", 'no JSON } "\n'):
        assert with_token.allowed_after(reasoning, regex="[0-9]{2}") == list(range(VOCAB))
        assert with_token.texts_after(f"{reasoning}{TAG}", regex="[0-9]{2}") == set("0123456789")
        assert with_token.texts_after(f"{reasoning}{TAG}", "4", regex="[0-9]{2}") == set("0123456789")
        assert with_token.allowed_after(f"{reasoning}{TAG}", "42", regex="[0-9]{2}") == EOS


def test_the_constraint_begins_after_an_end_of_reasoning_spelled_by_several_tokens(spelled):
    for text in ("", "Hm < 3 ", "</thi</th", "<</think"):
        assert len(spelled.allowed_after(text, choice=["yes"])) == VOCAB
    assert spelled.texts_after(f"Hm.<{TAG}", choice=["yes"]) == {"y"}
    assert spelled.texts_after(f"Hm.{TAG}", TAG, choice=[f"{TAG}no"]) == {"n"}, "only the first ends the reasoning"


def test_no_token_that_runs_past_the_end_of_the_reasoning_is_allowed(tmp_path):
    model = Model(tokenizer_with(tmp_path, ">\n", "k>{", f"x{TAG}y", "think>", "a>b"))
    overruns = {model.ids_of(text)[0] for text in (">\n", "k>{", f"x{TAG}y")}
    assert len(overruns) == 3
    everything = set(range(VOCAB))
    begin, middle, nearly, elsewhere = (
        set(model.allowed_after(text, choice=["yes"])) for text in ("Hm", "</thin", "</think", "<thin")
    )
    always = set(model.ids_of(f"x{TAG}y"))
    assert begin == elsewhere == everything - always
    assert middle == everything - always - set(model.ids_of("k>{"))
    assert nearly == everything - always - set(model.ids_of(">\n"))
    assert model.texts_after("</", "think>", choice=["yes"]) == {"y"}


def test_a_tool_call_ends_the_reasoning_and_is_constrained_itself(tmp_path, spelled):
    for model in (spelled, Model(tokenizer_with(tmp_path, TAG, CALL))):
        asked = {"grammar": CALLS, "or_from": CALL}
        assert model.texts_after(f"Hm. {CALL}", **asked) == set("0123456789")
        assert model.texts_after(f"Hm. {CALL}", "7", **asked) >= {"<|im_end|>", "7"}
        assert "<|im_end|>" in model.texts_after(f"Hm.{TAG}", **asked)
        assert len(model.allowed_after("Hm. <tool_", **asked)) == VOCAB


def test_a_grammar_without_the_call_tag_is_not_begun_by_a_call(tmp_path, spelled):
    special = Model(tokenizer_with(tmp_path, CALL, special=True))
    for model, grammar in ((special, CALLS), (spelled, "start: /[0-9]+/")):
        asked = {"grammar": grammar, "or_from": CALL}
        assert len(model.allowed_after(f"Hm. {CALL}", **asked)) == VOCAB
        assert 0 < len(model.allowed_after(f"Hm. {CALL}{TAG}", **asked)) < VOCAB


def test_an_output_may_end_in_its_reasoning(spelled):
    assert len(spelled.allowed_after("Hm.<|im_end|>", "", regex="a")) == VOCAB


def test_a_matcher_with_reasoning_can_start_from_any_part_of_an_output(spelled):
    """After a preemption, on another rank, or one of several sequences."""
    ids = np.array(spelled.ids_of(f'Is it 1 < 2? </ no.{TAG}{{"a": "{TAG}"}}'), np.int32)
    step_by_step = spelled.matcher(json_object=True)
    num_free = 0
    for length in range(len(ids) + 1):
        at_once = spelled.matcher(json_object=True).allowed_after(ids[:length])
        assert np.array_equal(step_by_step.allowed_after(ids[:length]), at_once)
        num_free += at_once.all()
    assert num_free == len(spelled.ids_of(f"Is it 1 < 2? </ no.{TAG}"))


def test_random_walks_after_the_reasoning_match_the_constraint(spelled):
    rng = random.Random(5)
    for _ in range(20):
        matcher, ids = spelled.matcher(regex="[0-9]{1,3}x"), spelled.ids_of(f"Hm{TAG[: rng.randrange(8)]}, {TAG}")
        while ids[-1] not in EOS:
            ids.append(rng.choice(np.flatnonzero(matcher.allowed_after(np.array(ids, np.int32))).tolist()))
        assert re.fullmatch("[0-9]{1,3}x", spelled.native.decode(ids).rpartition(TAG)[2])


def test_a_tokenizer_may_know_more_tokens_than_the_model_has(tmp_path):
    model = Model(tokenizer_with(tmp_path, f"{TAG}{{"), vocab_size=320)
    assert len(model.allowed_after("Hm", regex="a")) == 320


def test_reasoning_tags_that_cannot_work_are_refused():
    for tags, match in (
        ({"after": ""}, "structured_outputs.after='' isn't a string of 1 to 64"),
        ({"after": 5}, "structured_outputs.after=5 isn't a string"),
        ({"after": "x" * 65}, "isn't a string of 1 to 64"),
        ({"after": "\ud800"}, "structured_outputs.after: character 0 is half"),
        ({"or_from": CALL}, "structured_outputs.or_from='<tool_call>' is given without structured_outputs.after"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(match)):
            StructuredOutputsParams(regex="a", **tags)


@pytest.mark.parametrize(
    "asked", [{"regex": "[0-9]{2,4}"}, {"grammar": CALLS, "or_from": CALL}], ids=["after", "or from"]
)
def test_a_matcher_with_reasoning_can_take_tokens_back(tmp_path, asked):
    """Also from the constrained part into the reasoning, and from the output's end."""
    model = Model(tokenizer_with(tmp_path, CALL))
    rng = random.Random(5)
    matcher = model.matcher(**asked)
    output: list[int] = []
    num_taken_back = 0
    for _ in range(150):
        if output and rng.random() < 0.3:
            del output[rng.randrange(len(output)) :]
            num_taken_back += 1
        allowed = matcher.allowed_after(np.array(output, np.int32))
        fresh = model.matcher(**asked).allowed_after(np.array(output, np.int32))
        assert np.flatnonzero(allowed).tolist() == np.flatnonzero(fresh).tolist()
        # often a tag, which ends the reasoning
        is_reasoning = allowed.sum() > VOCAB // 2
        tag = rng.choice([TAG, CALL])
        output += model.ids_of(tag) if is_reasoning and rng.random() < 0.3 else [rng.choice(np.flatnonzero(allowed))]
    assert num_taken_back > 20
