"""Engines that run GGUF files give the tokens and log probabilities that transformers gives for the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import NUM_NEW_TOKENS, make_checkpoint, prompts, reference
from faults import signal_in_step
from peft_adapters import save_demo_adapter

from raycore import LLM, LoRARequest, SamplingParams
from raycore.errors import InvalidCheckpoint

pytest.importorskip("gguf", reason="needs the extra gguf")

from fuzz.gguf_files import tokenizer_metadata
from gguf_files import write_gguf, write_gguf_adapter  # it needs gguf

SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 299}
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
    ("tp_size", "kind", "kinds", "is_tied"),
    [
        (1, "Q4_1", {}, True),
        (2, "Q4_K", {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K"}, True),  # as in Q4_K_M
        (2, "Q8_0", {"up_proj": "Q5_1"}, False),
        (2, "Q6_K", {}, True),
    ],
)
def test_tokens_and_log_probabilities_equal_those_of_transformers(ray_cluster, tp_size, kind, kinds, is_tied, tmp_path):
    checkpoint = make_checkpoint("llama3", tmp_path, **SIZES, tie_word_embeddings=is_tied)
    plain, metadata = tmp_path / "plain", tokenizer_metadata(299)
    file = write_gguf(
        checkpoint, "llama3", tmp_path / "model.gguf", kind, kinds=kinds, metadata=metadata, parts=2, plain=plain
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(str(file), tensor_parallel_size=tp_size, dtype="float32", num_threads=1, max_num_seqs=8) as llm:
        assert llm.get_tokenizer().eos_token == "<|im_end|>"
        outputs = [output.outputs[0] for output in llm.generate(given, PARAMS, use_tqdm=False)]
    tokens = [list(output.token_ids) for output in outputs]
    assert tokens == reference(plain)
    for prompt, output in zip(prompts(), outputs, strict=True):
        found = [each[token].logprob for each, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert found == pytest.approx(expected_logprobs(plain, prompt, list(output.token_ids)), abs=2e-2)


def test_a_running_engine_takes_other_weights(ray_cluster, tmp_path):
    """Those of another file of the same types, and an update in blocks. Other types change nothing."""
    import gguf
    import ray
    import torch
    from safetensors.torch import load_file

    first = make_checkpoint("llama3", tmp_path, **SIZES)
    second = make_checkpoint("llama3", tmp_path / "second", **SIZES, initializer_range=0.05)
    metadata = tokenizer_metadata(299)
    files = [
        write_gguf(checkpoint, "llama3", tmp_path / f"{kind}{number}.gguf", kind, metadata=metadata, plain=plain)
        for number, (checkpoint, kind) in enumerate([(first, "Q8_0"), (second, "Q8_0"), (second, "Q4_1")])
        for plain in [tmp_path / f"plain{number}"]
    ]
    given = [{"prompt_token_ids": prompt} for prompt in prompts()]
    blocks = load_file(tmp_path / "plain0" / "model.safetensors")
    for name in (each for each in blocks if "_proj.weight" in each or "embed_tokens" in each):  # also the head
        numbers = blocks[name].float().numpy()
        blocks[name] = torch.from_numpy(gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0))
    options = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8}
    with LLM(str(files[0]), weight_transfer_config={"backend": "ray"}, **options) as llm:

        def tokens() -> list[list[int]]:
            return [list(output.outputs[0].token_ids) for output in llm.generate(given, PARAMS, use_tqdm=False)]

        before = tokens()
        assert before == reference(tmp_path / "plain0")
        with pytest.raises(InvalidCheckpoint, match=r"Q4_12.gguf is stored as Q4_1, and the engine keeps this weight"):
            llm.reload_weights(files[2])
        assert tokens() == before
        llm.reload_weights(files[1])
        assert tokens() == reference(tmp_path / "plain1")
        llm.start_weight_update()
        llm.update_weights({"update_info": {"refs": [ray.put(blocks)]}})
        llm.finish_weight_update()
        assert tokens() == before


def test_adapters_outlive_lost_ranks_and_sleep(ray_cluster, tmp_path):
    """Adapters of PEFT and of llama.cpp, and draft tokens. The file's integers stay as they are."""
    checkpoint = make_checkpoint("llama3", tmp_path, **SIZES)
    plain = tmp_path / "plain"
    file = write_gguf(
        checkpoint, "llama3", tmp_path / "model.gguf", "Q4_1", metadata=tokenizer_metadata(300), plain=plain
    )
    adapter, merged = save_demo_adapter(tmp_path, 1, plain)
    own = write_gguf_adapter(checkpoint, adapter, "llama3", tmp_path / "adapter.gguf")
    expected = reference(plain) + 2 * reference(merged)
    assert len({tuple(each) for each in expected}) == 2 * len(prompts())
    adapters = [None, LoRARequest("peft", 1, str(adapter)), LoRARequest("gguf", 2, str(own))]
    given = [{"prompt_token_ids": prompt} for prompt in prompts()]
    options = {"data_parallel_size": 2, "enable_lora": True, "max_loras": 2, "batch_invariant": True}
    options |= {"speculative_config": {"model": str(file), "num_speculative_tokens": 2}}
    with LLM(str(file), dtype="float32", num_threads=1, max_num_seqs=8, **options) as llm:

        def tokens() -> list[list[int]]:
            chosen = [each for each in adapters for _ in given]
            outputs = llm.generate(given * len(adapters), PARAMS, use_tqdm=False, lora_request=chosen)
            return [list(output.outputs[0].token_ids) for output in outputs]

        assert tokens() == expected
        info = llm.engine_infos[1]
        assert "14 of 14 quantized linear layers stay integers" in info.weights[0]
        signal_in_step(llm, 1, info.pid, 4)
        assert tokens() == expected
        llm.sleep(level=2)
        llm.wake_up()
        assert tokens() == expected
