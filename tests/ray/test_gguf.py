"""Engines that run GGUF files give the tokens and log probabilities that transformers gives for the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import NUM_NEW_TOKENS, make_checkpoint, prompts, reference

from raycore import LLM, SamplingParams

pytest.importorskip("gguf", reason="needs the extra gguf")

from gguf_files import write_gguf  # it needs gguf
from gguf_fuzz import tokenizer_metadata

SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 300}
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=1)


def expected_logprobs(path: Path, prompt: list[int], output: list[int]) -> list[float]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


# where weights stay in integers, layers round their inputs to 16 bits, which this model's wide weights amplify
@pytest.mark.parametrize(
    ("tp_size", "kind", "tolerance"), [(1, "Q4_1", 2e-2), (2, "Q4_K", 2e-2), (2, "Q8_0", 2e-2), (2, "Q6_K", 2e-2)]
)
def test_tokens_and_log_probabilities_equal_those_of_transformers(ray_cluster, tp_size, kind, tolerance, tmp_path):
    checkpoint = make_checkpoint("llama3", tmp_path, **SIZES)
    plain, metadata = tmp_path / "plain", tokenizer_metadata(300)
    file = write_gguf(checkpoint, "llama3", tmp_path / "model.gguf", kind, metadata=metadata, parts=2, plain=plain)
    given = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(str(file), tensor_parallel_size=tp_size, dtype="float32", num_threads=1, max_num_seqs=8) as llm:
        assert llm.get_tokenizer().eos_token == "<|im_end|>"
        outputs = [output.outputs[0] for output in llm.generate(given, PARAMS, use_tqdm=False)]
    tokens = [list(output.token_ids) for output in outputs]
    assert tokens == reference(plain)
    for prompt, output in zip(prompts(), outputs, strict=True):
        found = [each[token].logprob for each, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert found == pytest.approx(expected_logprobs(plain, prompt, list(output.token_ids)), abs=tolerance)
