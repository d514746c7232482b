"""Which of transformers' causal language models raycore runs through transformers' code, and whether tokens are equal.

For each architecture, a small checkpoint with random weights is made, and five prompts are continued greedily in
float32: by raycore, with `model_impl="transformers"`, in chunks, in one batch, and by transformers alone, for each
prompt by itself. Each architecture has a process of its own. Prints a Markdown table. With `--adapters`, all prompts
but the first have a LoRA adapter, and transformers alone has merged weights.

    python benchmarks/fallback_models.py
    python benchmarks/fallback_models.py --models gpt2 opt
    python benchmarks/fallback_models.py --first 0 --last 99
    python benchmarks/fallback_models.py --adapters --models gpt2 opt
    python benchmarks/fallback_models.py --json docs/model_types.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raycore.checkpoint.model_spec import load_model_spec
from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.errors import InvalidAdapter, RaycoreError
from raycore.executor.inline import InlineExecutor
from raycore.lora.request import LoRARequest
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

LAYERS, VOCAB, LENGTH, NUM_NEW_TOKENS = 4, 128, 128, 12
PROMPT_LENGTHS = (3, 40, 17, 29, 1)
LIMIT_S = 180
ATTENTION = re.compile(r"(attn|attention)\.(?!gate_proj)|[qko]_proj")
"""In the names of linear layers of attention. PEFT takes a `gate_proj` for that of experts."""
HUGE = 100_000_000
"""Parameters of a network that isn't small, although its configuration was to be."""

SIZES: dict[str, int] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "embed_dim"], 64),
    **dict.fromkeys(["word_embed_proj_dim"], 64),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"], 96),
    **dict.fromkeys(["encoder_ffn_dim", "dff", "d_ff", "inner_dim", "intermediate_size_mlp"], 96),
    **dict.fromkeys(["dense_intermediate_size"], 96),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 32),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "shared_intermediate_size"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], LAYERS),
    **dict.fromkeys(["encoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "multi_query_group_num", "num_kv_heads"], 2),
    **dict.fromkeys(["head_dim", "attention_head_dim", "kv_channels", "global_head_dim", "swa_head_dim"], 16),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length", "n_ctx"], LENGTH),
    **dict.fromkeys(["max_target_positions"], LENGTH),
    # prompts outgrow it
    **dict.fromkeys(["sliding_window", "window_size", "attention_window"], 17),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"], 2),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"], 1),
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "qk_head_dim": 24,
    "rotary_dim": 8,
    "type_vocab_size": 2,
    "vocab_size": VOCAB,
}
"""What a configuration gets that has a number under this name."""
KEPT_NONE = ("head_dim", "sliding_window", "q_lora_rank", "n_inner", "window_size", "num_key_value_heads")
"""Names that keep the default None, which means something of its own."""
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **{
        name: {"pad_token_id": 1}
        for name in (
            "camembert",
            "data2vec-text",
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        )
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "modernbert-decoder": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 17},
    "mpt": {"max_seq_len": LENGTH},
}
"""What some configurations need beside, or instead, by the model's type."""


class Outcome(NamedTuple):
    """What became of one architecture."""

    result: str
    """`equal`, `different`, `refused`, `can't be built` or `no result`."""
    reason: str = ""


def small_config(model_type: str) -> Any:
    """Return a configuration of a small model."""
    kind = CONFIG_MAPPING[model_type]
    defaults = kind().to_dict()
    depths = [
        defaults.get(name) for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
    ]
    depth = next((each for each in depths if isinstance(each, int)), 0)
    chosen: dict[str, Any] = {}
    for name, value in defaults.items():
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if name in SIZES and (is_number or (value is None and name not in KEPT_NONE)):
            chosen[name] = SIZES[name]
        elif isinstance(value, list) and depth and len(value) == depth:
            chosen[name] = _of_layers(value)
        elif name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            chosen[name] = None
        elif name.endswith("token_id") and is_number:
            chosen[name] = VOCAB - 1
        elif name in ("initializer_range", "init_std"):
            chosen[name] = 0.3  # wide, so that the top two logits of a random model are rarely close
        elif name == "is_decoder":
            chosen[name] = True
    if isinstance(defaults.get("qk_rope_head_dim"), int):  # heads of DeepSeek's kind
        chosen |= {"head_dim": 8} if "head_dim" in defaults else {}
        chosen |= {"num_key_value_heads": 4} if "num_key_value_heads" in chosen else {}
    return _first_accepted(kind, chosen | EXCEPTIONS.get(model_type, {}))


def _of_layers(values: list[Any]) -> list[Any]:
    """Return a list for a few layers that has all of the different values, as far as possible."""
    different = [value for index, value in enumerate(values) if value not in values[:index]]
    return (different * LAYERS)[:LAYERS] if len(different) > 1 else values[:LAYERS]


def _first_accepted(kind: Any, chosen: dict[str, Any]) -> Any:
    changes = ({}, {"bos_token_id": 0}, {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
    for change in changes[:-1]:
        try:
            return kind(**chosen | change)
        except Exception:  # configurations check themselves, and may raise anything
            continue
    return kind(**chosen | changes[-1])


def make_checkpoint(model_type: str, path: Path) -> None:
    """Write a small random checkpoint with a tokenizer."""
    config = small_config(model_type)
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if size > HUGE:
        raise ValueError(f"{size} parameters, because it has other models in it")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    words = tokenizers.models.WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(path / "tokenizer.json"))


def prompts() -> list[list[int]]:
    """Return random prompts."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB - 8, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@torch.no_grad()
def reference(path: Path) -> list[list[int]]:
    """Return transformers' continuations, without a cache."""
    network = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    continued = prompts()
    for tokens in continued:
        for _ in range(NUM_NEW_TOKENS):
            tokens.append(int(network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return [tokens[-NUM_NEW_TOKENS:] for tokens in continued]


def generated(path: Path, adapter: LoRARequest | None = None, **options: Any) -> list[list[int]]:
    """Return raycore's continuations. All prompts but the first have the adapter."""
    config = resolve(path, dtype="float32", num_threads=1, max_num_seqs=8, max_num_batched_tokens=24, **options)
    executor = InlineExecutor(config, RankIdentity(0, 1))
    executor.initialize()
    core = EngineCore(config, executor)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    tokens: list[list[int]] = [[] for _ in PROMPT_LENGTHS]
    for seq_id, prompt in enumerate(prompts()):
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, params, seed=0, lora=adapter if seq_id else None))
    while core.has_work():
        failed = core.release_prepared()
        if failed:
            raise InvalidAdapter(next(iter(failed.values())))
        outputs = core.step()
        if outputs is None:
            time.sleep(0.001)  # the adapter is being read
        else:
            for seq_id, token in zip(outputs.seq_ids.tolist(), outputs.token_ids.tolist(), strict=True):
                tokens[seq_id].append(token)
    core.shutdown()
    return tokens


def save_adapter(path: Path, directory: Path) -> list[str]:
    """Write an adapter of all linear layers, and the model with merged weights. Returns the layers' names.

    PEFT can't adapt single linear layers in all networks with experts. There, the adapter is for attention alone.
    """
    names = list(load_model_spec(path, "transformers").linears)
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if any("expert" in name for name, _ in network.named_parameters()):
        names = [name for name in names if ATTENTION.search(name)]
    options: dict[str, Any] = {"r": 4, "lora_alpha": 32, "init_lora_weights": False}
    adapted = get_peft_model(network, LoraConfig(target_modules="|".join(map(re.escape, names)), **options))
    adapted.save_pretrained(str(directory / "adapter"))
    adapted.merge_and_unload().save_pretrained(directory / "merged")
    return names


def outcome_with_adapter(path: Path, options: dict[str, Any]) -> Outcome:
    """Return what becomes of an adapter of the model in the directory `path`."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            names = save_adapter(path, Path(folder))
            plain, merged = reference(path), reference(Path(folder) / "merged")
        except RaycoreError as error:
            return Outcome("refused", _short(error).rpartition("code in raycore: ")[2])
        except Exception as error:  # PEFT's code may raise anything
            return Outcome("can't be built", f"{type(error).__name__}: {_short(error)}")
        found = generated(path, LoRARequest("adapter", 1, f"{folder}/adapter"), enable_lora=True, **options)
    kinds = ", ".join(dict.fromkeys(re.sub(r"^.*\.\d+\.", "", name) for name in names))
    if found != [plain[0], *merged[1:]]:
        return Outcome("different", kinds)
    return Outcome("equal" if plain[1:] != merged[1:] else "equal without the adapter, too", kinds)


def outcome(model_type: str, *, adapters: bool) -> Outcome:
    """Return what becomes of an architecture, in this process."""
    options = {"model_impl": "transformers", "block_size": 8, "num_gpu_blocks_override": 40, "load_format": "auto"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            make_checkpoint(model_type, path)
        except Exception as error:  # transformers' code may raise anything
            return Outcome("can't be built", f"{type(error).__name__}: {_short(error)}")
        if adapters:
            return outcome_with_adapter(path, options)
        try:
            found = generated(path, **options)
        except RaycoreError as error:
            return Outcome("refused", _short(error).rpartition("code in raycore: ")[2])
        expected = reference(path)
    return Outcome("equal" if found == expected else "different", "" if found == expected else f"{expected} {found}")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _report(model_type: str, adapters: bool, into: Any) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    try:
        into.send(outcome(model_type, adapters=adapters))
    except Exception:  # whatever this program doesn't expect is shown
        into.send(Outcome("no result", " ".join(traceback.format_exc().split())))


def outcome_apart(model_type: str, adapters: bool) -> Outcome:
    """Return what becomes of an architecture, in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(model_type, adapters, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(LIMIT_S) else Outcome("no result", f"it took more than {LIMIT_S} s")
    except EOFError:
        return Outcome("no result", "its process died")
    finally:
        process.kill()
        process.join(10)


def write_json(path: Path, outcomes: dict[str, Outcome]) -> None:
    """Write each architecture's class and whether its tokens are equal, one on a line."""
    rows = [
        f"    {json.dumps(name)}: "
        + json.dumps([MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name], "equal" if found.result == "equal" else "refused"])
        for name, found in sorted(outcomes.items())
    ]
    types = ",\n".join(rows)
    path.write_text(f'{{\n  "transformers": "{transformers.__version__}",\n  "types": {{\n{types}\n  }}\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    parser.add_argument("--models", nargs="*", default=names, help="types of models, as in config.json")
    parser.add_argument("--first", type=int, default=0, help="the first of them to run, counted from 0")
    parser.add_argument("--last", type=int, default=len(names) - 1, help="the last of them to run")
    parser.add_argument("--adapters", action="store_true", help="compare adapters with merged weights instead")
    parser.add_argument("--json", type=Path, help="where to write what docs/write_model_types.py reads")
    args = parser.parse_args()
    # once, instead of in each process
    import raycore.fallback.decoder  # noqa: F401

    outcomes: dict[str, Outcome] = {}
    print(f"transformers {transformers.__version__}\n\n| model type | class | result | reason |\n|---|---|---|---|")
    started_s = time.monotonic()
    for name in args.models[args.first : args.last + 1]:
        outcomes[name] = found = outcome_apart(name, args.adapters)
        reason = found.reason.replace("|", "\\|")
        print(f"| {name} | {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]} | {found.result} | {reason} |", flush=True)
    if args.json is not None:
        write_json(args.json, outcomes)
    counts = Counter(each.result for each in outcomes.values())
    print(f"\n{json.dumps(counts)} in {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
