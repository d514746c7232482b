"""`raycore bench serve` with a real server of an engine that isn't one, and the numbers that it makes of its times."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from raycore.cli.bench.client import RequestResult
from raycore.cli.bench.report import measured, table
from raycore.cli.main import main
from raycore.demo import demo_model_path
from raycore.server import ServerOptions, build_app
from raycore.server.process.listening import listen
from raycore.server.process.serving import HttpServer

SUMMARY = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "latencies"),
    *("max_concurrent_requests", "queue_times", "rtfx"),
}
RUN = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency"),
}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=400)


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Generator[str, None, None]:
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(build_app(engine, ServerOptions(("fake", "other"))), listener)
        server.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.stop()


@pytest.fixture
def bench(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the benchmark. Returns its status, what it printed, and its results."""

    def run(*flags: str) -> tuple[int, str, dict[str, Any]]:
        own = ["--base-url", url, "--tokenizer", str(demo_model_path()), "--num-prompts", "6", "--disable-tqdm"]
        own += ["--random-input-len", "12", "--random-output-len", "5", "--save-result", "--result-dir", str(tmp_path)]
        status = main(["bench", "serve", *own, "--result-filename", "r.json", *flags])
        path = tmp_path / "r.json"
        out, err = capsys.readouterr()
        return status, out + err, json.loads(path.read_text().splitlines()[-1]) if path.exists() else {}

    return run


def test_results_have_vllms_keys(bench: Any, engine: FakeEngine) -> None:
    start = len(engine.asked)
    status, out, found = bench("--metadata", "tp=1", "--num-warmups", "2", "--ignore-eos", "--temperature", "0.5")
    assert status == 0
    metrics = {f"{s}_{m}_ms" for m in ("ttft", "tpot", "itl") for s in ("mean", "median", "std", "p99")}
    assert found.keys() == SUMMARY | RUN | metrics | {"tp"}
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 30)
    assert found["total_input_tokens"] == sum(map(len, engine.asked[start + 2 :]))
    assert (found["request_rate"], found["model_id"], found["request_goodput"]) == ("inf", "fake", None)
    assert (engine.params[-1].ignore_eos, engine.params[-1].temperature) == (True, 0.5)
    assert len(engine.asked) == start + 8
    assert f"{'Successful requests:':<40} 6" in out
    assert "---------------Time to First Token----------------" in out
    assert f"{'P99 ITL (ms):':<40} {found['p99_itl_ms']:.2f}" in out


@pytest.mark.parametrize("backend", ["vllm", "openai", "openai-chat"])
def test_details_are_those_of_each_request(bench: Any, engine: FakeEngine, backend: str) -> None:
    flags = ["--backend", backend, "--save-detailed", "--percentile-metrics", "e2el,client_queue_time"]
    flags += ["--metric-percentiles", "25,99.9", "--max-concurrency", "1", "--model", "other"]
    _, _, found = bench(*flags, "--request-id-prefix", f"run-{backend}-")
    assert [each.split("-")[-2] for each in engine.request_ids[-6:]] == [str(index) for index in range(6)]
    assert found.keys() >= {"p25_e2el_ms", "p99.9_client_queue_time_ms"}
    assert found["generated_texts"] == [" 85 is the answer"[: len(found["generated_texts"][0])]] * 6
    assert found["output_lens"] == [5] * 6
    assert all(len(gaps) >= 1 for gaps in found["itls"])
    for ttft, gaps, latency in zip(found["ttfts"], found["itls"], found["latencies"], strict=True):
        assert ttft + sum(gaps) == pytest.approx(latency)
    assert found["queue_times"] == sorted(found["queue_times"])
    assert found["queue_times"][-1] > 0


def test_the_tokenizer_may_be_in_a_gguf_file(bench: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
    from fuzz.gguf_files import tokenizer_metadata  # it needs gguf

    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    for key, value in tokenizer_metadata(300).items():
        kinds = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
        kinds[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    status, _, found = bench("--tokenizer", str(tmp_path / "vocabulary.gguf"))
    assert (status, found["completed"]) == (0, 6)
    status, out, _ = bench("--tokenizer", str(tmp_path / "other.gguf"))
    assert (status, "there is no such file; give its directory with --tokenizer" in out) == (1, True)


def test_failed_requests_are_counted_and_told(bench: Any) -> None:
    status, out, found = bench("--model", "none-such")
    assert (status, found["completed"], found["failed"]) == (1, 0, 6)
    assert "failed: status 404: " in out
    status, out, _ = bench("--model", "none-such", "--num-warmups", "1")
    assert status == 1
    assert "raycore: a request before the measured ones failed: status 404" in out


def test_results_may_be_appended_and_have_goodput(bench: Any, tmp_path: Path) -> None:
    bench()
    _, out, found = bench("--append-result", "--goodput", "ttft:60000", "e2el:0", "--lora-modules", "fake", "other")
    assert len((tmp_path / "r.json").read_text().splitlines()) == 2
    assert found["request_goodput"] == 0
    assert "Request goodput (req/s):" in out


def test_requests_follow_the_rate(bench: Any) -> None:
    _, out, found = bench("--request-rate", "20", "--save-detailed", "--burstiness", "1000")
    starts = found["start_times"]
    assert starts[-1] - starts[0] > 0.2
    assert "Request rate configured (RPS):           20.00" in out
    _, _, found = bench("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "20", "--ramp-up-end-rps", "200")
    assert found["ramp_up_strategy"] == "linear"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--percentile-metrics", "ttft,colour"], "--percentile-metrics colour: known are ttft"),
        (["--metric-percentiles", "101"], "--metric-percentiles 101: give numbers from 0 to 100"),
        (["--goodput", "itl:3"], "--goodput itl:3: give METRIC:MILLISECONDS"),
        (["--goodput", "ttft"], "--goodput ttft: give METRIC:MILLISECONDS"),
        (["--request-rate", "0"], "--request-rate 0.0"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-strategy needs --ramp-up-start-rps"),
        (["--ramp-up-end-rps", "3"], "need --ramp-up-strategy"),
        (["--metadata", "x"], "--metadata x: give KEY=VALUE"),
        (["--header", "x"], "--header x: give KEY=VALUE"),
        (["--extra-body", "[]"], "--extra-body='[]' isn't a dict"),
        (["--max-concurrency", "0"], "--max-concurrency isn't at least 1"),
        (["--tokenizer", "/no/such"], "/no/such"),
        (["--base-url", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models can't be read"),
    ],
)
def test_unusable_flags_are_refused_by_name(bench: Any, flags: list[str], told: str) -> None:
    status, out, _ = bench(*flags)
    assert (status, out.count("\n")) == (1, 1)
    assert told in out


def test_metrics_are_vllms() -> None:
    one = RequestResult(
        10, True, start_time=5.0, ttft=0.5, itl=[0.25, 0.25], latency=1.0, output_tokens=5, queue_time=2.0
    )
    other = RequestResult(
        20, True, start_time=5.5, ttft=1.0, itl=[], latency=1.0, text="four tokens as text", queue_time=0.0
    )
    lost = RequestResult(30, error="gone")
    found = measured(
        [one, other, lost],
        2.0,
        percentiles=[50],
        selected=["ttft", "tpot", "itl", "e2el", "e2el_including_client_queue"],
        goals_ms={"ttft": 600, "tpot": 125},
        count_tokens=lambda text: len(text.split()),
        is_pooling=False,
    )
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"], found["output_lens"]) == (30, 9, [5, 4, 0])
    assert (found["output_throughput"], found["total_token_throughput"]) == (4.5, 19.5)
    assert found["request_goodput"] == 0.5
    assert (found["mean_ttft_ms"], found["mean_itl_ms"], found["mean_e2el_ms"]) == (750, 250, 1000)
    assert found["mean_tpot_ms"] == pytest.approx((125 + 0) / 2)
    assert found["median_e2el_including_client_queue_ms"] == 2000
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (2.0, 2)
    shown = table(found, [50], ["tpot"], 4, 8.0)
    assert shown.count("\n") == 18
    assert "Mean TPOT (ms):                          62.50" in shown
    pooled = measured(
        [one, lost],
        2.0,
        percentiles=[99],
        selected=["e2el"],
        goals_ms={},
        count_tokens=len,
        is_pooling=True,
    )
    assert "ttfts" not in pooled
    assert (pooled["total_input_tokens"], pooled["p99_e2el_ms"]) == (10, 1000)
    assert "generated" not in table(pooled, [99], ["e2el"], None, 8.0)
