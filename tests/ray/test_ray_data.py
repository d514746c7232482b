"""Ray Data's pipelines with an engine: their columns, what survives, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import forked_ray
import numpy as np
import pandas as pd
import pytest
import ray
from fake_ranks import free_resources, has_free, live_groups
from job_cluster import STEP_S, eventually
from peft_adapters import save_demo_adapter
from PIL.Image import Image
from pooling_checkpoints import CASES, checkpoint
from ray_data_program import LIMITS, answer, demo_rows
from vision_checkpoints import QWEN3, image, make_vision_checkpoint

from raycore import LLM, SamplingParams
from raycore.data import ProcessorConfig, build_processor
from raycore.demo import demo_model_path

pytest.importorskip("pyarrow", reason="needs the extra data")
from ray.data import Dataset, ExecutionResources
from ray.data.llm import build_processor as rays_build_processor

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]

GREEDY = {"temperature": 0.0, "max_tokens": 8}
LONG = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
CAPTION = {"type": "text", "text": "What is in this image?"}
AS_TEXT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is in this image?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def is_all_free(ray_cluster):
    """Whether nothing of an engine is there any more. So it is in the end."""
    before = free_resources()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # each process that runs tasks imports Ray Data first
    context.execution_options.resource_limits = ExecutionResources.for_limits(cpu=4)

    def is_free() -> bool:
        return not live_groups() and not engines_actors() and has_free(ray.available_resources(), before)

    yield is_free
    eventually(is_free, describe)


def describe() -> str:
    return f"groups {live_groups()}, actors {engines_actors()}, free {ray.available_resources()}"


def engines_actors(*more: str) -> list[dict[str, Any]]:
    """The living actors of engines, and those with one of these in the names of their classes."""
    from ray._private.state import actors

    names = ("DPEngineCoreActor", "Reaper", "EngineControl", *more)
    return [
        actor
        for actor in actors().values()
        if actor["State"] != "DEAD" and any(name in actor["ActorClassName"] for name in names)
    ]


def config(**fields: Any) -> ProcessorConfig:
    return ProcessorConfig(model_source=demo_model_path(), **{"engine_kwargs": LIMITS, **fields})


def processed(rows: list[dict[str, Any]], config: ProcessorConfig, **functions: Any) -> list[dict[str, Any]]:
    return build_processor(config, **functions)(ray.data.from_items(rows)).take_all()


def test_rows_of_each_kind_get_the_columns_that_rays_processors_give(capsys):
    text = "27 + 58 ="
    with LLM(demo_model_path(), **LIMITS) as llm:
        asked = SamplingParams(**GREEDY, logprobs=1, prompt_logprobs=1)
        (expected,) = llm.generate([text], asked, use_tqdm=False)
    given = [
        {"messages": [{"role": "user", "content": text}]},
        {"prompt": text},
        {"tokenized_prompt": expected.prompt_token_ids},
    ]
    params = GREEDY | {"logprobs": 1, "prompt_logprobs": 1}
    rows = [{"id": index, "sampling_params": params, **each} for index, each in enumerate(given * 20)]
    chosen = config(concurrency=2, chat_template_stage={"chat_template": CHAT}, should_continue_on_error=True)
    dataset = ray.data.from_items(rows)
    dataset.context.execution_options.preserve_order = True
    processor = rays_build_processor(chosen)
    assert processor.list_stage_names() == ["EngineStage"]
    found = processor(dataset).take_all()
    assert [row["id"] for row in found] == list(range(60))
    first = expected.outputs[0]
    for row in found:
        assert (row["generated_text"], list(row["generated_tokens"])) == (first.text, first.token_ids)
        assert (row["num_generated_tokens"], row["num_input_tokens"]) == (
            len(first.token_ids),
            len(expected.prompt_token_ids),
        )
        assert list(row["prompt_token_ids"]) == expected.prompt_token_ids
        assert (row["__inference_error__"], row["embeddings"]) == ("", None)
        assert len(row["batch_uuid"]) == 32
        assert row["time_taken_llm"] > 0
        assert row["metrics"]["num_generation_tokens"] == len(first.token_ids)
        assert "max_tokens=8" in row["params"]
        assert first.logprobs is not None
        token = first.token_ids[0]
        assert row["logprobs"][0][token]["logprob"] == pytest.approx(first.logprobs[0][token].logprob, abs=1e-4)
        assert row["logprobs"][0][token]["decoded_token"] == first.logprobs[0][token].decoded_token
        assert row["prompt_logprobs"][0] is None
        assert "sampling_params" not in row
    assert sorted(row["request_id"] for row in found) == list(range(60))
    assert {row["prompt"] for row in found} == {text, ""}


def test_stages_with_actors_of_their_own_give_the_same():
    rows = [
        {
            "id": index,
            "messages": [{"role": "user", "content": each["prompt"]}],
            "sampling_params": GREEDY | {"detokenize": False},
        }
        for index, each in enumerate(demo_rows(40))
    ]
    own = {"num_cpus": 0, "batch_size": 8}
    chosen = config(
        chat_template_stage={"chat_template": CHAT, **own},
        tokenize_stage=own,
        detokenize_stage=own,
        log_engine_metrics=False,
        max_pending_requests=8,
        concurrency=(1, 2),
    )
    processor = build_processor(chosen)
    assert processor.list_stage_names() == ["ChatTemplateStage", "TokenizeStage", "EngineStage", "DetokenizeStage"]
    found = processor(ray.data.from_pandas(with_arrays(rows))).take_all()
    assert {row["id"]: row["generated_text"] for row in found} == {index: answer(index) for index in range(40)}


def with_arrays(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows with arrays of messages, as pandas has them that comes from a table."""
    frame = pd.DataFrame(rows)
    return frame.assign(messages=[np.array(each, dtype=object) for each in frame["messages"]])


def test_a_bad_row_gets_its_error_and_harms_no_other(tmp_path):
    path, _ = save_demo_adapter(tmp_path, 1)
    good = {"prompt": "27 + 58 =", "sampling_params": GREEDY, "model": None}
    bad = {
        "a": good | {"sampling_params": {"temperature": -1.0}},
        "b": good | {"prompt": "9" * 500},
        "c": good | {"prompt": ""},
        "d": good | {"model": "nowhere"},
        "e": good | {"prompt": None},
        "f": good | {"sampling_params": {"no_such": 1}},
    }
    rows = [{"id": name, **row} for name, row in bad.items()]
    rows += [{"id": "adapted", **good, "model": path.name}, *({"id": str(index), **good} for index in range(40))]
    chosen = config(
        engine_kwargs=LIMITS | {"enable_lora": True, "max_model_len": 64},
        dynamic_lora_loading_path=str(tmp_path),
        should_continue_on_error=True,
        batch_size=16,
    )
    found = processed(rows, chosen, postprocess=lambda row: {"id": row["id"], "text": row["generated_text"]})
    errors = {row["id"]: row["__inference_error__"] for row in found if row["__inference_error__"]}
    assert errors.keys() == bad.keys()
    assert "temperature=-1" in errors["a"]
    assert "max_model_len=64" in errors["b"]
    assert "is an empty string" in errors["c"]
    assert "nowhere" in errors["d"]
    assert "messages, prompt and tokenized_prompt" in errors["e"]
    assert "no_such" in errors["f"]
    texts = {row["id"]: row["text"] for row in found if not row["__inference_error__"]}
    assert {texts[str(index)] for index in range(40)} == {" 85"}
    assert texts["adapted"] != " 85"


def test_without_continuing_a_bad_row_ends_the_pipeline_with_its_fault(is_all_free):
    rows = [
        {
            "source": f"{count}.txt",
            "prompt": "27 + 58 =",
            "sampling_params": GREEDY | {"max_tokens": count},
            "id": count,
        }
        for count in (8, -3)
    ]
    told = r"max_tokens=-3(.|\n)*row 1 of the 2(.|\n)*the row has id=-3, source='-3\.txt'(.|\n)*27 \+ 58 ="
    with pytest.raises(Exception, match=told):
        processed(rows, config())
    # although whoever keeps the error keeps Ray Data's actor
    eventually(is_all_free, describe)


@pytest.mark.parametrize(
    ("form", "task", "options"),
    [
        ("last", "embed", {"runner": "pooling", "convert": "embed"}),
        ("reranker", "score", CASES["reranker"].options),
    ],
)
def test_rows_are_pooled_as_the_engine_alone_pools_them(tmp_path, form, task, options):
    path = str(checkpoint(form, tmp_path))
    rows = [{"id": index, "tokenized_prompt": [5, 6, 7 + index]} for index in range(20)]
    rows += [{"id": 20 + index, "prompt": f"t{index + 1} t2"} for index in range(20)]
    prompts = [row.get("tokenized_prompt", row.get("prompt")) for row in rows]
    engine = {**LIMITS, **options}
    with LLM(path, **engine) as llm:
        expected = [each.outputs.data for each in llm.encode(prompts, pooling_task=task, use_tqdm=False)]
    chosen = ProcessorConfig(model_source=path, task_type=task, engine_kwargs=engine, batch_size=8)
    found = sorted(processed(rows, chosen), key=lambda row: row["id"])
    for row, result in zip(found, expected, strict=True):
        assert row["embeddings"] == pytest.approx(result, abs=1e-5)
        assert (row["generated_text"], row["num_generated_tokens"]) == ("", 0)
    assert len({tuple(row["embeddings"]) for row in found}) > 20


def test_rows_see_their_images_wherever_these_are_decoded(tmp_path):
    path = str(make_vision_checkpoint(QWEN3, tmp_path))
    params = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    sizes = [(64, 64), (96, 64), (64, 128), (128, 96)]
    images = [image(*size, seed) for seed, size in enumerate(sizes)]
    asked = [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(each)}}, CAPTION]}]
        for each in images
    ]
    engine = LIMITS | {"max_model_len": 256}
    with LLM(path, **engine) as llm:
        outputs = llm.chat(asked, SamplingParams(**params), use_tqdm=False)
        expected = [output.outputs[0].token_ids for output in outputs]
    assert len({tuple(tokens) for tokens in expected}) > 1, "the images make no difference"
    talks = [{"id": index, "messages": messages, "sampling_params": params} for index, messages in enumerate(asked)]
    given = [
        {"id": number, "prompt": AS_TEXT, "multimodal_data": {"image": [each]}, "sampling_params": params}
        for number, each in enumerate([*images, *map(np.asarray, images)], len(talks))
    ]
    for rows, fields in ((talks + given, {}), (talks, {"prepare_multimodal_stage": {"num_cpus": 0}})):
        found = processed(rows, ProcessorConfig(model_source=path, engine_kwargs=engine, **fields))
        tokens = {row["id"]: list(row["generated_tokens"]) for row in found}
        assert tokens == {index: expected[index % len(images)] for index in range(len(rows))}, fields


def data_url(picture: Image) -> str:
    file = BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def pid_of(class_name: str) -> int | None:
    pids = [
        actor["Pid"] for actor in engines_actors(class_name) if class_name in actor["ActorClassName"] and actor["Pid"]
    ]
    return pids[0] if pids else None


def long_rows(count: int) -> Dataset:
    return ray.data.from_items([{**row, "sampling_params": LONG} for row in demo_rows(count)])


def test_each_row_comes_once_although_processes_are_killed():
    """First a rank, and then the map actor, with which the engine ends."""
    count, victims = 300, ["DPEngineCoreActor", "MapWorker"]
    with LLM(demo_model_path(), **LIMITS) as llm:
        prompts = [row["prompt"] for row in demo_rows(count)]
        outputs = llm.generate(prompts, SamplingParams(**LONG), use_tqdm=False)
        undisturbed = {index: output.outputs[0].text for index, output in enumerate(outputs)}
    chosen = config(concurrency=2, batch_size=10, max_concurrent_batches=4)
    processor = build_processor(chosen, postprocess=lambda row: {"id": row["id"], "text": row["generated_text"]})
    found: list[dict[str, Any]] = []
    killed: set[int] = set()
    for row in processor(long_rows(count)).iter_rows():
        found.append(row)
        if len(found) == 80 * (len(killed) + 1):
            pid = pid_of(victims[len(killed)]) if len(killed) < len(victims) else None
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
    assert len(killed) == len(victims)
    assert len(found) == count
    assert {row["id"]: row["text"] for row in found} == undisturbed


def test_an_abandoned_pipeline_leaves_nothing():
    rows = iter(build_processor(config(concurrency=2, batch_size=10))(long_rows(2_000)).iter_rows())
    assert next(rows)["generated_text"]
    assert engines_actors()
    del rows
    eventually(lambda: pid_of("MapWorker") is None)


def started(*arguments: str, has_own_ray: bool = False, **environment: str) -> subprocess.Popen[str]:
    """`has_own_ray`: whether the program starts a Ray, whose workers are forks then."""
    program = Path(__file__).parent / "ray_data_program.py"
    return subprocess.Popen(
        [sys.executable, *([forked_ray.__file__] if has_own_ray else []), str(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def wait_for_line(program: subprocess.Popen[str], line: str) -> None:
    """Wait until a program prints a line; also read what it prints to stderr."""
    assert program.stdout is not None
    assert program.stderr is not None
    errors: list[str] = []
    threading.Thread(target=lambda: errors.extend(program.stderr or ()), daemon=True).start()
    killer = threading.Timer(2 * STEP_S, program.kill)
    killer.start()
    try:
        assert any(each.strip() == line for each in program.stdout), "".join(errors)[-3000:]
    finally:
        killer.cancel()


def test_a_killed_driver_leaves_nothing(address):
    program = started("forever", address)
    try:
        wait_for_line(program, "first row")
        assert pid_of("DPEngineCoreActor") is not None
    finally:
        program.kill()
        program.wait(STEP_S)
    eventually(lambda: not engines_actors(), describe)


def test_two_ranks_and_ray_datas_own_tasks_share_three_cpus_and_an_interrupted_run_goes_on(tmp_path):
    """In a cluster of its own. Rows that were written aren't computed again."""
    program = started("files", str(tmp_path), has_own_ray=True)
    try:
        wait_for_line(program, "some are written")
    finally:
        os.kill(program.pid, signal.SIGKILL)
        program.wait(STEP_S)
    again = started("files", str(tmp_path), has_own_ray=True)
    wait_for_line(again, "each row is there once, and fewer were computed")
    assert again.wait(STEP_S) == 0
