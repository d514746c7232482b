"""Mistakes that people make, and what each message has to say: the value, and the remedy.

A mistake's `says` is a regular expression for the message. Files are those of `files.py`, in the current directory.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Mistake(NamedTuple):
    """What somebody does, and what the last line that they read says."""

    does: str
    """A command of `raycore`, or an expression in Python."""
    says: str


class Request(NamedTuple):
    """A request to a server, and what the message of its answer says."""

    path: str
    body: Any
    says: str
    headers: dict[str, str] = {}  # noqa: RUF012  # nothing changes it
    method: str = "POST"


COMMANDS = [
    # the model
    Mistake(
        "generate --model /no/such/directory a", "isn't a directory: give the directory of a downloaded checkpoint"
    ),
    Mistake("generate --model notes.txt a", "'notes.txt' is a file: give a directory, or a GGUF file"),
    Mistake("generate --model empty a", "empty has no config.json: give the directory"),
    Mistake("generate --model no-config a", "no-config has no config.json: give the directory"),
    Mistake("generate --model half a", "it has 896,104 bytes, and its header describes .*: download it again"),
    Mistake("generate --model no-shard a", "lacks 1 of the 2 files .*00002-of-00002.safetensors. Download the rest"),
    Mistake("generate --model lfs a", "Git LFS pointer, not the file itself: run `git lfs pull` there"),
    Mistake("generate --model lfs-config a", "Git LFS pointer, not the file itself: run `git lfs pull` there"),
    Mistake("generate --model broken-config a", "config.json isn't valid JSON: .*Correct it, or download it again"),
    Mistake(
        "generate --model pickled a", "weights in pytorch_model.bin only, and raycore reads safetensors: .*convert"
    ),
    Mistake("generate --model unknown-architecture a", "WeirdForCausalLM.*`weird`"),
    Mistake("generate --model text-encoder a", "T5ForConditionalGeneration.*has no causal language model for it"),
    Mistake("generate --model other-size a", r"has shape \(320, 128\), but config.json implies \(320, 256\)"),
    Mistake("generate --model more-layers a", "they have 4 layers, and config.json has num_hidden_layers=5"),
    Mistake("generate --model quantized a", "quant_method='aqlm': expected 'compressed-tensors' or "),
    Mistake("generate --model no-tokenizer a", "tokenizer.json doesn't exist.*convert it"),
    Mistake("generate --model broken-tokenizer a", "tokenizer.json isn't a tokenizer .*Download it again"),
    Mistake("generate --tokenizer /no/such/directory a", "tokenizer: /no/such/directory isn't a directory: give one"),
    Mistake("generate --model file.gguf a", "file.gguf can't be read: .*download it again"),
    Mistake("generate --model page.gguf a", "page.gguf can't be read: it begins with b'<!DO'.*download it again"),
    Mistake("generate --revision v1 a", "revision='v1' is for names on the hub, .*: omit it"),
    # options and their values
    Mistake("generat a", r"unknown command 'generat'; did you mean generate\?"),
    Mistake("generate --tensor-paralel-size 2 a", r"did you mean --tensor-parallel-size\?"),
    Mistake("generate --dtype float12 a", "dtype='float12' is not supported: use 'auto', 'float32'"),
    Mistake("generate --max-model-len 100000 a", "max_model_len=100000 is above the checkpoint's maximum of 1024"),
    Mistake("generate --max-model-len long a", "max_model_len='long' isn't a positive integer, also as 4k"),
    Mistake(
        "generate --tensor-parallel-size 3 a", r"doesn't divide .*num_attention_heads=4: choose one of \[1, 2, 4\]"
    ),
    Mistake("generate --tensor-parallel-size two a", "tensor_parallel_size='two' isn't a positive integer"),
    Mistake("generate -dp 0 a", "data_parallel_size=0 isn't an integer from 1 to"),
    Mistake("generate --pipeline-parallel-size 9 a", "more than the model's 4 layers .*: use fewer stages"),
    Mistake("generate --executor-backend inline -tp 2 a", "needs 2: use executor_backend='ray'"),
    Mistake("generate", "no prompt given, and none on standard input"),
    Mistake("generate --temperature -1 a", "temperature=-1.0 isn't at least 0.0"),
    Mistake("generate --max-tokens 0 a", "max_tokens=0 isn't at least 1"),
    Mistake("generate --seed abc a", "--seed: 'abc' isn't an integer"),
    Mistake("generate --max-num-seqs 0 a", "max_num_seqs=0 isn't a positive integer"),
    Mistake("generate --gpu-memory-utilization 1.5 a", "gpu_memory_utilization=1.5 isn't a number above 0, at most 1"),
    Mistake("generate --speculative-config '{\"method\"' a", "speculative_config='{\"method\"' isn't a JSON object"),
    Mistake("generate --speculative-config.method magic a", "method='magic' is not supported: use 'ngram', 'suffix'"),
    Mistake("generate --speculative-config.num_speculative_token 2 a", "did you mean num_speculative_tokens?"),
    Mistake("generate --hf-overrides '{' a", "hf_overrides='{' isn't a JSON object"),
    Mistake("generate --quantization awq a", "its weights aren't quantized: omit it"),
    Mistake("generate --kv-transfer-config.kv_connector Magic a", "kv_connector='Magic' is none of OffloadConnector"),
    Mistake("generate --load-format pickle a", "load_format='pickle' is not supported: use 'auto'"),
    Mistake("generate --config missing.yaml a", "--config missing.yaml can't be read: No such file"),
    Mistake("generate --config yaml.yaml a", "--config yaml.yaml isn't valid YAML: .*line 2"),
    Mistake("generate --config unknown.yaml a", r"unknown flag 'dtipe'; did you mean dtype\?"),
    Mistake("generate --log-level loud a", "'loud' .choose from 'debug', 'info'"),
    # the server
    Mistake("serve --port 99999", "port=99999 isn't an integer from 0 .a free port. to 65535"),
    Mistake("serve --host no.such.host", "the host can't be resolved: give the name or address"),
    Mistake("serve --host 192.0.2.77 --port 0", "no interface of this machine has this address: give one"),
    Mistake("serve --uds /no/such/directory/socket", "uds='/no/such/directory/socket'.*make its directory first"),
    Mistake("serve --ssl-certfile missing.pem", "missing.pem can't be read: No such file"),
    Mistake("serve --port 0 --ssl-keyfile notes.txt --ssl-certfile notes.txt", "notes.txt can't be used .*: give PEM"),
    Mistake("serve --ssl-keyfile notes.txt", "ssl_keyfile .--ssl-keyfile. needs ssl_certfile"),
    Mistake("serve --chat-template missing.jinja", "chat_template='missing.jinja' is neither an existing file nor"),
    Mistake("serve --chat-template template.jinja", "chat_template='template.jinja' isn't a Jinja template: line 1: "),
    Mistake("serve --tool-call-parser magic", "tool_call_parser='magic' is not supported: use 'hermes'"),
    Mistake("serve --reasoning-parser magic", "reasoning_parser='magic' is not supported: use 'deepseek_r1'"),
    Mistake("serve --lora-modules one=/no/such/adapter", "needs an engine with enable_lora=True: give --enable-lora"),
    Mistake("serve --enable-lora --lora-modules one", "lora_modules='one': expected name=path"),
    Mistake(
        "serve --enable-lora --lora-modules a=/no/such/adapter", "isn't a directory: give the directory of an adapter"
    ),
    Mistake("serve --enable-lora --lora-modules a=adapter-without-weights", "adapter_model.safetensors doesn't exist"),
    Mistake("serve --enable-lora --lora-modules a=adapter-of-another-kind", "peft_type='IA3': expected"),
    Mistake("serve --enable-lora --lora-modules a=broken-adapter", "isn't a safetensors file of an adapter"),
    Mistake("serve --enable-lora --lora-modules a=adapter-of-high-rank", "max_lora_rank"),
    Mistake("serve --port 0 --middleware no.such.Middleware", "No module named 'no'.: name it as package.module.Name"),
    Mistake(
        "serve --port 0 --log-config-file missing.json", "log_config_file='missing.json' can't be read: No such file"
    ),
    Mistake("serve --port 0 --log-config-file yaml.yaml", "log_config_file='yaml.yaml' is neither JSON nor YAML"),
    Mistake("serve --otlp-traces-endpoint localhost", "give a URL, such as http://localhost:4317"),
    Mistake("serve --api-server-count 0", r"api_server_count=0 isn't in \[1, "),
    Mistake("serve --shutdown-timeout soon", "'soon' isn't a number"),
    Mistake("serve --root-path v1", "root_path='v1' doesn't begin with /, as in /api"),
    Mistake("serve --api-key ''", "API key 1 .of --api-key or RAYCORE_API_KEY. is empty"),
    Mistake("serve --served-model-name ''", "served_model_name='' is no name"),
    Mistake("serve --generation-config missing", "generation_config='missing' isn't 'auto', 'vllm' or a directory"),
    Mistake("serve --override-generation-config.temperature -1", "temperature=-1.0 isn't at least 0.0"),
    Mistake("serve --default-chat-template-kwargs '{'", "default_chat_template_kwargs='{' isn't a JSON object"),
    # the other commands
    Mistake("run-batch -i missing.jsonl -o out.jsonl", "missing.jsonl can't be read: No such file"),
    Mistake(
        "run-batch -i requests.jsonl -o /no/such/directory/out.jsonl", "No such file or directory: make its directory"
    ),
    Mistake("run-batch -i requests.jsonl -o requests.jsonl", "line 1, isn't a result of a batch .*right file"),
    Mistake("run-batch -i requests.jsonl", "required: -o/--output-file"),
    Mistake("run-batch -i empty -o out.jsonl", "empty .*isn't a regular file"),
    Mistake("scale --name nothing", "required: -dp/--data-parallel-size"),
    Mistake("chat --url http://localhost:1", "can't be reached .*Connection refused.: `raycore serve` starts a server"),
    Mistake("chat --url localhost", "--url localhost: give the URL of a server's API"),
    Mistake("bench serve --port 1", "can't be read .*: `raycore serve` starts a server"),
    Mistake("completion powershell", "'powershell' .choose from 'bash', 'zsh', 'fish'"),
]
"""Commands that are refused before anything starts."""

PROGRAMS = [
    Mistake("LLM(MODEL, tensor_parallel_sze=2)", r"'tensor_parallel_sze'; did you mean tensor_parallel_size\?"),
    Mistake("LLM(MODEL, tensor_parallel_size='two')", "tensor_parallel_size='two' isn't a positive integer"),
    Mistake("LLM('/no/such/directory')", "isn't a directory: give the directory of a downloaded checkpoint"),
    Mistake("LLM(None)", "model=None: give the directory of a checkpoint"),
    Mistake("LLM(MODEL, chat_template='{% for %}')", "chat_template='{% for %}' isn't a Jinja template: line 1: "),
    Mistake("LLM(MODEL, engine_name='a b')", "engine_name='a b' isn't a name of letters, digits"),
    Mistake("AsyncLLM(MODEL, quantization='int3')", "quantization='int3' is not supported: use 'fp8'"),
    Mistake("asyncio.run(AsyncLLM.create(MODEL, seed='x'))", "seed='x' isn't a 64-bit integer"),
    Mistake("LLM.get_or_create(MODEL, num_threads=0)", "num_threads=0 isn't a positive integer"),
    Mistake("EngineArgs(MODEL, max_num_sekuences=1)", r"'max_num_sekuences'.*did you mean max_num_seqs\?"),
    Mistake("SamplingParams(temperature='hot')", "temperature='hot' isn't a number"),
    Mistake("SamplingParams(top_p=1.1)", r"top_p=1.1 isn't in \(0.0, 1.0\]"),
    Mistake("SamplingParams(n=0)", "n=0 isn't at least 1"),
    Mistake("SamplingParams(stop=[''])", "stop contains '': every entry must be a non-empty string"),
    Mistake("SamplingParams(min_tokens=10, max_tokens=5)", "min_tokens=10 is above max_tokens=5"),
    Mistake("SamplingParams(structured_outputs={'json': {}})", "isn't a StructuredOutputsParams"),
    Mistake("BeamSearchParams(beam_width=5000, max_tokens=5)", r"beam_width=5000 isn't in \[1, 1024\]"),
    Mistake("LoRARequest('one', 0, '/adapters/one')", "lora_int_id"),
    Mistake("build_processor(ProcessorConfig(model_source=MODEL, concurrency=0))", "concurrency"),
    Mistake("build_openai_app({'llm_config': []})", r"unknown setting 'llm_config'; did you mean llm_configs\?"),
]
"""Expressions that are refused before anything starts. `MODEL` is the bundled model."""

CALLS = [
    Mistake("LLM('no-weights')", "has neither model.safetensors nor .*Download the rest"),
    Mistake("LLM(MODEL, device_ids=[5])", "device_ids='5' needs GPUs, .*: omit it"),
    Mistake("LLM(MODEL, placement_groups=[1])", r"placement_groups\[0\]=1 isn't a placement group: give what"),
    Mistake("LLM(MODEL, kv_cache_memory_bytes=1000)", "0 tokens .*less than max_model_len=1024: lower"),
    Mistake("LLM(MODEL, worker_cls='no.such.Class')", "worker_cls='no.such.Class' can't be imported .*: name it as"),
    Mistake("LLM(MODEL, engine_name=llm.name)", "is the name of another engine .*: choose another name, or end that"),
    Mistake("llm.generate(5)", "prompts=5 isn't a prompt .* or a list of prompts"),
    Mistake("llm.generate('')", "prompt 0 is an empty string"),
    Mistake("llm.generate('1' * 5000)", "5000 tokens.*max_model_len=1024.*Shorten the prompt"),
    Mistake("llm.generate([[99999]])", "token id 99999, outside the vocabulary of 320"),
    Mistake("llm.generate({'text': 'a'})", "prompt 0 has the key 'text', which isn't supported: a prompt has 'prompt'"),
    Mistake("llm.generate('a', {'temperature': 1})", "isn't a SamplingParams: give SamplingParams"),
    Mistake(
        "llm.generate(['a', 'b'], [SamplingParams()])", "1 sampling_params for 2 prompts: give one, or one for each"
    ),
    Mistake("llm.generate('a', SamplingParams(logit_bias={99999: 1}))", "logit_bias contains token id 99999"),
    Mistake("llm.generate('a', SamplingParams(logprobs=500))", "logprobs=500 is more than the vocabulary's 320"),
    Mistake("llm.generate('a', constrained(json='{'))", "the schema isn't valid JSON"),
    Mistake("llm.generate('a', constrained(regex='('))", "regex='.': .*unclosed group"),
    Mistake("llm.generate('a', constrained(grammar='root = '))", "Expected ::= at line 1"),
    Mistake("llm.generate('a', lora_request=3)", "lora_request=3 isn't a LoRARequest"),
    Mistake("llm.generate('a', lora_request=LoRARequest('a', 1, '/a'))", "needs an engine with enable_lora=True"),
    Mistake("llm.generate('a', tokenization_kwargs={'truncate': 5})", "'truncate': known are truncate_prompt_tokens"),
    Mistake("llm.generate({'prompt': 'a', 'multi_modal_data': {'image': 1}})", "takes only texts"),
    Mistake("llm.chat('hi')", r"messages\[0\] is 'h': it must be a mapping with 'role' and 'content'"),
    Mistake("llm.chat([{'role': 'user'}])", r"messages\[0\] .role 'user'. has no 'content'"),
    Mistake("llm.chat(image_messages)", "the messages have images, but the model takes only texts"),
    Mistake("llm.embed('a')", "not the task 'embed': for that, start another one, as LLM.model, runner=\"pooling\""),
    Mistake("llm.beam_search(['a'], SamplingParams())", "isn't a BeamSearchParams: give its beam_width and max_tokens"),
    Mistake("llm.scale(0)", "data_parallel_size=0 isn't an integer from 1 to"),
    Mistake("llm.scale('two')", "data_parallel_size='two' isn't an integer from 1 to"),
    Mistake("llm.sleep(5)", "level=5 isn't 0, 1 or 2"),
    Mistake("llm.wake_up(['magic'])", "isn't a list of 'weights', 'kv_cache', 'scheduling'"),
    Mistake("llm.collective_rpc('no_such_method')", "'no_such_method': workers have no such method"),
    Mistake("llm.add_lora(LoRARequest('a', 1, '/a'))", "needs an engine with enable_lora=True"),
    Mistake("llm.reload_weights('/no/such/directory')", "isn't a directory: give the directory"),
    Mistake("llm.save_sharded_state('/proc/none')", "/proc/none can't be made .*: No such file"),
    Mistake("llm.update_weights({'a': 1})", "has no update_info"),
    Mistake("llm.start_profile()", "profiles need the option profiler_config: start the engine with"),
    Mistake("ended.generate('a')", "the engine was shut down"),
    Mistake("ended.scale(2)", "the engine was shut down"),
]
"""Expressions with a running engine, `llm`, and one that was shut down, `ended`."""

_MESSAGES = [{"role": "user", "content": "a"}]
_IMAGE = [{"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}]
_TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE_MESSAGES = [{"role": "user", "content": _IMAGE}]

REQUESTS = [
    Request("/v1/completions", {"prompt": "a"}, "a valid API key is required: send it", {"Authorization": "Bearer x"}),
    Request("/v1/completions", '{"prompt": "a"', "isn't valid JSON"),
    Request("/v1/completions", {}, "prompt is missing: give prompt"),
    Request("/v1/completions", {"prompt": "a", "model": "gpt-4"}, "the model 'gpt-4' doesn't exist; served here: demo"),
    Request("/v1/completions", {"prompt": "1" * 5000}, "1024 tokens.*5000 in the prompt. Shorten the prompt"),
    Request("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens=0 isn't at least 1"),
    Request("/v1/completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
    Request("/v1/completions", {"prompt": "a", "n": 100000}, r"n=100000 isn't in \[0, 128\]"),
    Request("/v1/completions", {"prompt": "a", "logprobs": 1000}, r"logprobs=1000 isn't in \[0, 20\]"),
    Request("/v1/completions", {"prompt": "a", "stop": ["a"] * 100}, "stop has 100 strings; at most 16"),
    Request("/v1/completions", {"prompt": "a", "guided_regex": "("}, "regex='.': .*unclosed group"),
    Request("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias has the key 'x'"),
    Request("/v1/chat/completions", {"messages": []}, "messages"),
    Request("/v1/chat/completions", {"messages": [{"role": "user"}]}, r"messages\[0\] .role 'user'. has no 'content'"),
    Request("/v1/chat/completions", {"messages": IMAGE_MESSAGES}, "takes only texts"),
    Request("/v1/chat/completions", {"messages": _MESSAGES, "tool_choice": "required"}, "there are no tools"),
    Request(
        "/v1/chat/completions",
        {"messages": _MESSAGES, "tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice names 'g', which isn't one of tools: f",
    ),
    Request(
        "/v1/chat/completions",
        {"messages": _MESSAGES, "response_format": {"type": "json"}},
        "response_format.type='json' is not supported: use 'text'",
    ),
    Request("/v1/chat/completions", {"messages": _MESSAGES, "top_logprobs": 5}, "top_logprobs needs logprobs=true"),
    Request("/v1/chat/completions", {"messages": _MESSAGES, "chat_template": "a"}, "--trust-request-chat-template"),
    Request("/v1/embeddings", {"input": "a"}, "isn't served: .* raycore serve MODEL --runner pooling"),
    Request("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, "with --enable-admin-endpoints"),
    Request("/v1/models/none", None, "the model 'none' doesn't exist; served here: demo", method="GET"),
]
"""Requests to a server whose model is called `demo`, and whose key is `k`."""
