"""Each field of vLLM's requests: without effect as null and at its default, and with a typical value.

A row asks once for each of the three values. Its outcome has what the answers say, or their status if it isn't 200.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from openai_scenarios.table import (
    EMBEDS,
    GENERATES,
    PROMPT,
    PROMPT_IDS,
    QUESTION,
    SCENARIOS,
    SCORES,
    WEATHER,
    Api,
    Scenario,
)

NULL = "vLLM refuses null for this field."
TOOLS = "OpenAI and vLLM refuse an empty list of tools. raycore takes it for no tools."
IGNORED = "vLLM ignores this field; raycore does what it says or refuses it."
CUT = "vLLM keeps the special tokens that the cut leaves out."


class Endpoint(NamedTuple):
    """What the rows of an endpoint ask, besides the field."""

    path: str
    body: Mapping[str, Any]
    of: str
    plain: Any
    """The outcome of the body without further fields."""


COMPLETIONS = Endpoint("/v1/completions", {"prompt": PROMPT, "temperature": 0}, GENERATES, " 85")
CHAT = Endpoint("/v1/chat/completions", {"messages": QUESTION, "temperature": 0}, GENERATES, "85")
TOKENIZE = Endpoint("/tokenize", {"prompt": PROMPT}, GENERATES, PROMPT_IDS)
TOKENIZE_CHAT = Endpoint("/tokenize", {"messages": QUESTION}, GENERATES, 18)
RESPOND = Endpoint("/v1/responses", {"input": QUESTION[0]["content"], "temperature": 0}, GENERATES, "85")
MESSAGE = Endpoint("/v1/messages", {"messages": QUESTION, "max_tokens": 32, "temperature": 0}, GENERATES, "85")
COUNT = Endpoint("/v1/messages/count_tokens", {"messages": QUESTION}, GENERATES, 18)
EMBED = Endpoint("/v1/embeddings", {"input": PROMPT}, EMBEDS, [[128, 0.02, -0.1]])
POOL = Endpoint("/pooling", {"input": PROMPT}, EMBEDS, [[128, 0.02, -0.1]])
SCORE = Endpoint("/score", {"text_1": PROMPT, "text_2": "58"}, SCORES, [0.526])
RERANK = Endpoint("/rerank", {"query": PROMPT, "documents": ["58"]}, SCORES, [0.526])
CLASSIFY = Endpoint("/classify", {"input": PROMPT}, SCORES, [0.381])


def of_answer(answer: Any) -> Any:
    """What an answer of any endpoint says: its text, tokens, or first numbers."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    if "content" in answer:
        return answer["content"][0]["text"]
    if "input_tokens" in answer:
        return answer["input_tokens"]
    if "tokens" in answer:
        return answer["tokens"] if answer["count"] < len(QUESTION) + 10 else answer["count"]
    if "results" in answer:
        return [round(each["relevance_score"], 3) for each in answer["results"]]
    entries = answer["data"]
    if "score" in entries[0]:
        return [round(each["score"], 3) for each in entries]
    if "probs" in entries[0]:
        return [round(each["probs"][0], 3) for each in entries]
    vectors = [each.get("embedding", each.get("data")) for each in entries]
    return [
        ["base64"] if isinstance(each, str) else [len(each), *(round(number, 2) for number in each[:2])]
        for each in vectors
    ]


def add(
    endpoint: Endpoint,
    field: str,
    default: Any,
    typical: Any,
    expected: Any = ...,
    differs: str | None = None,
    **others: Any,
) -> None:
    """Add a row.

    Args:
        expected: the outcome of the typical value, if it isn't that of the body alone.
        others: further fields of all requests of the row.
    """

    def ask(api: Api) -> Any:
        outcomes: list[Any] = []
        for value in (None, default, typical):
            answer = api.post(endpoint.path, **{**endpoint.body, **others, field: value})
            outcomes.append(of_answer(answer.json()) if answer.status_code == 200 else answer.status_code)
        return outcomes

    plain = endpoint.plain
    name = f"field_{field}_of_{endpoint.path.strip('/').replace('/', '_')}"
    name += "_chat" if endpoint is TOKENIZE_CHAT else ""
    outcomes = [plain, plain, plain if expected is ... else expected]
    SCENARIOS.append(Scenario(name, ask, outcomes, differs, endpoint.of))


for each in (COMPLETIONS, CHAT):
    add(each, "frequency_penalty", 0.0, "0.5")
    add(each, "presence_penalty", 0.0, "0.5")
    add(each, "repetition_penalty", 1.0, "1.01")
    add(each, "logit_bias", {}, {"26": "1.5"})
    add(each, "n", 1, 2, 400, NULL if each is COMPLETIONS else None)
    add(each, "seed", 0, "5")
    add(each, "stop", [], "5", each.plain[:-1])
    add(each, "stop_token_ids", [], [24], each.plain[:-1])
    add(each, "stream", False, "no")
    add(each, "stream_options", {}, {"include_usage": True}, 400)
    add(each, "top_p", 1.0, "0.5")
    add(each, "top_k", 0, "5")
    add(each, "min_p", 0.0, "0.1")
    add(each, "user", "me", "you")
    add(each, "use_beam_search", False, False, differs=NULL)
    add(each, "length_penalty", 1.0, "1.5", differs=NULL)
    add(each, "early_stopping", False, True)
    add(each, "include_stop_str_in_output", False, "true", differs=NULL)
    add(each, "ignore_eos", False, False, differs=NULL)
    add(each, "min_tokens", 0, "1", differs=NULL)
    add(each, "skip_special_tokens", True, True, differs=NULL)
    add(each, "spaces_between_special_tokens", True, False, differs=NULL)
    add(each, "truncate_prompt_tokens", -1, 5000, 400)
    add(each, "truncation_side", "left", "middle", 400)
    add(each, "prompt_logprobs", 0, 1)
    add(each, "allowed_token_ids", [224, 27, 24, 0], [24, 27, 0, 224])
    add(each, "bad_words", [], ["77"], differs=NULL)
    add(each, "add_special_tokens", each is COMPLETIONS, True, differs=NULL)
    add(each, "structured_outputs", {"regex": ".*"}, {"choice": [each.plain]})
    add(each, "response_format", {"type": "text"}, {"type": "json_schema"}, 400)
    add(each, "priority", 0, 0, differs=NULL)
    add(each, "request_id", "mine", "yours", differs=NULL)
    add(each, "session_id", "mine", "yours")
    add(each, "return_tokens_as_token_ids", False, True)
    add(each, "return_token_ids", False, True)
    add(each, "routed_experts_prompt_start", 0, 3, differs=NULL)
    add(each, "return_token_offsets", False, True)
    add(each, "mm_payload", "tensors", "none", differs=NULL)
    add(each, "return_mm_kwargs", True, False)
    add(each, "cache_salt", "salt", "", 400)
    add(each, "kv_transfer_params", {}, {})
    add(each, "vllm_xargs", {}, {"a": 1})
    add(each, "thinking_token_budget", -1, -1)
    add(each, "stream_interval", 1, 4)
    add(each, "best_of", 1, 3)
    add(each, "logprob_token_ids", [], [5], 400)
    add(each, "guided_regex", ".*", "[0-9]", "8" if each is CHAT else "0", IGNORED)
    add(each, "nonsense", 1, {"a": [1]})

add(COMPLETIONS, "echo", False, True, PROMPT + " 85")
add(COMPLETIONS, "logprobs", 0, 2)
add(COMPLETIONS, "max_tokens", 16, 2, " 8")
add(COMPLETIONS, "suffix", None, "x", 400)

add(CHAT, "logprobs", False, True)
add(CHAT, "top_logprobs", 0, 2, 400)
add(CHAT, "max_tokens", 16, "1", "8")
add(CHAT, "max_completion_tokens", 16, 1, "8")
add(CHAT, "tools", None, [WEATHER], tool_choice="none")
add(CHAT, "tool_choice", "none", "often", 400)
add(CHAT, "parallel_tool_calls", True, False)
add(CHAT, "reasoning_effort", "low", "enormous", 400)
add(CHAT, "include_reasoning", True, False, differs=NULL)
add(CHAT, "add_generation_prompt", True, True, differs=NULL)
add(CHAT, "continue_final_message", False, False, differs=NULL)
add(CHAT, "return_prompt_text", False, True)
add(CHAT, "documents", [], [{"text": "x"}])
add(CHAT, "chat_template", None, "{{ 1 }}", 400)
add(CHAT, "chat_template_kwargs", {}, {"enable_thinking": False})
add(CHAT, "media_io_kwargs", {}, {})
add(CHAT, "mm_processor_kwargs", {}, {})
add(CHAT, "metadata", {}, {"a": "b"})
add(CHAT, "modalities", ["text"], ["text", "audio"])
add(CHAT, "service_tier", "auto", "flex")
add(CHAT, "store", False, True)
add(CHAT, "verbosity", "medium", "high")
add(CHAT, "prediction", None, {"type": "content", "content": "85"})
add(CHAT, "functions", [], [{"name": "f"}])
add(CHAT, "function_call", "none", "auto")
add(CHAT, "web_search_options", None, {})
add(CHAT, "prompt_cache_key", "k", "l")
add(CHAT, "safety_identifier", "me", "you")

for each in (RESPOND, MESSAGE):
    add(each, "top_p", 1.0, 0.5)
    add(each, "top_k", 0, 5)
    add(each, "stream", False, False)
    add(each, "cache_salt", "salt", "", 400)
    add(each, "chat_template_kwargs", {}, {"enable_thinking": False})
    add(each, "kv_transfer_params", {}, {})
    add(each, "vllm_xargs", {}, {"a": 1})
    add(each, "nonsense", 1, {"a": [1]})

add(RESPOND, "background", False, "often", 400, NULL)
add(RESPOND, "frequency_penalty", 0.0, "0.5")
add(RESPOND, "presence_penalty", 0.0, "0.5")
add(RESPOND, "repetition_penalty", 1.0, "1.01")
add(RESPOND, "ignore_eos", False, False, differs=NULL)
add(RESPOND, "include", [], ["everything"], 400)
add(RESPOND, "include_reasoning", True, False, differs=NULL)
add(RESPOND, "include_stop_str_in_output", False, True, differs=NULL)
add(RESPOND, "instructions", "", "Add.")
add(RESPOND, "logit_bias", {}, {"26": 1.5})
add(RESPOND, "max_output_tokens", 16, 1, "8")
add(RESPOND, "max_tool_calls", 1, 3)
add(RESPOND, "metadata", {}, {"a": "b"})
add(RESPOND, "min_p", 0.0, "0.1")
add(RESPOND, "parallel_tool_calls", True, False)
add(
    RESPOND,
    "previous_response_id",
    None,
    "resp_none",
    400,
    "vLLM answers 404. OpenAI answers 400, and so does raycore.",
)
add(RESPOND, "priority", 0, 0, differs=NULL)
add(RESPOND, "prompt_cache_key", "k", "l")
add(RESPOND, "reasoning", {}, {"effort": "enormous"}, 400)
add(RESPOND, "safety_identifier", "me", "you")
add(RESPOND, "seed", 0, "5")
add(RESPOND, "service_tier", "auto", "flex", differs=NULL)
add(RESPOND, "session_id", "mine", "yours")
add(RESPOND, "skip_special_tokens", True, True, differs=NULL)
add(RESPOND, "stop", [], "5", "8")
add(RESPOND, "stop_token_ids", [], [24], "8")
add(RESPOND, "store", True, False)
add(RESPOND, "structured_outputs", {"regex": ".*"}, {"choice": ["86"]}, "86")
add(RESPOND, "text", {}, {"format": {"type": "text"}})
add(RESPOND, "tool_choice", "none", "often", 400, NULL)
add(RESPOND, "tools", [], [{"type": "function", "name": "f", "parameters": {}}], differs=NULL, tool_choice="none")
add(RESPOND, "top_logprobs", 0, 2)
add(RESPOND, "truncation", "disabled", "sometimes", 400, NULL)
add(RESPOND, "user", "me", "you")

add(MESSAGE, "metadata", {}, {"user_id": "me"})
add(MESSAGE, "output_config", {}, {"effort": "enormous"}, 400)
add(MESSAGE, "service_tier", "auto", "standard_only")
add(MESSAGE, "stop_sequences", [], ["5"], "8")
add(MESSAGE, "system", "", "Add.")
add(MESSAGE, "thinking", {"type": "disabled"}, {"type": "adaptive"})
add(MESSAGE, "tool_choice", {"type": "none"}, {"type": "none"}, tools=[{"name": "f", "input_schema": {}}])
add(MESSAGE, "tools", [], [{"name": "f", "input_schema": {}}])
add(COUNT, "system", "", "Add.", 27)
add(COUNT, "tools", [], [{"name": "f", "input_schema": {}}])
add(COUNT, "thinking", {"type": "disabled"}, {"type": "adaptive"})
add(COUNT, "chat_template_kwargs", {}, {"enable_thinking": True})
add(COUNT, "nonsense", 1, {"a": [1]})

add(TOKENIZE, "add_special_tokens", True, False, differs=NULL)
add(TOKENIZE, "return_token_strs", False, True)
add(TOKENIZE, "model", "demo", "other", 404)
add(TOKENIZE, "nonsense", 1, 2)
add(TOKENIZE_CHAT, "add_generation_prompt", True, False, 15, NULL)
add(TOKENIZE_CHAT, "continue_final_message", False, False, differs=NULL)
add(TOKENIZE_CHAT, "add_special_tokens", False, True, differs=NULL)
add(TOKENIZE_CHAT, "chat_template_kwargs", {}, {"enable_thinking": True})
add(TOKENIZE_CHAT, "chat_template", None, "{{ 1 }}", 400)
add(TOKENIZE_CHAT, "tools", None, [WEATHER])
add(TOKENIZE_CHAT, "media_io_kwargs", {}, {})

for each in (EMBED, POOL, CLASSIFY, SCORE, RERANK):
    add(each, "user", "me", "you")
    add(each, "truncate_prompt_tokens", -1, 5000, 400)
    add(each, "truncation_side", "left", "middle", 400)
    add(each, "request_id", "mine", "yours", differs=NULL)
    add(each, "priority", 0, 0, differs=NULL)
    add(each, "use_activation", True, True)
    add(each, "cache_salt", "salt", "", 400)
    add(each, "padding", "do_not_pad", "sometimes", 400)
    add(each, "mm_processor_kwargs", {}, {})
    add(each, "nonsense", 1, 2)
for each in (EMBED, POOL):
    add(each, "encoding_format", "float", "base64", [["base64"]], NULL)
    add(each, "embed_dtype", "float32", "float16", differs=NULL)
    add(each, "endianness", "native", "big", differs=NULL)
    refused = "vLLM's /pooling embeds in all dimensions only." if each is POOL else None
    add(each, "dimensions", 128, "8", [[8, 0.06, -0.34]], refused)
    add(each, "add_special_tokens", True, False, differs=NULL)
for each in (SCORE, RERANK):
    add(each, "max_tokens_per_query", 0, 5000, 400, NULL)
    add(each, "max_tokens_per_doc", 0, 5000, 400, NULL)
    add(each, "chat_template_kwargs", {}, {})
add(RERANK, "top_n", 0, "1", differs=NULL)
add(POOL, "task", "embed", "classify", 400)
