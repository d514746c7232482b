"""The option that sends traces."""

from __future__ import annotations

import pytest

from raycore.cli.main import main
from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig
from raycore.parts.traces.config import TracesConfig

WRONG = ["localhost:4317", "http://localhost:99999", "http://:4317", "http://localhost:x"]


@pytest.mark.parametrize("url", ["http://localhost:4317", "https://collector/v1/traces"])
def test_a_url_is_kept(url):
    config = resolve(demo_model_path(), otlp_traces_endpoint=url).traces
    assert config.is_on
    assert config.otlp_traces_endpoint == url


@pytest.mark.parametrize("text", [*WRONG, 5, ""])
def test_what_is_no_url_is_refused(text):
    with pytest.raises(InvalidConfig, match=r"otlp_traces_endpoint=.*: give a URL, such as http://localhost:4317"):
        resolve(demo_model_path(), otlp_traces_endpoint=text)


@pytest.mark.parametrize("text", WRONG)
def test_the_flag_is_refused_before_the_engine_starts(text, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--port", "0", "--otlp-traces-endpoint", text])
    assert "give a URL, such as http://localhost:4317" in capsys.readouterr().err


def test_processes_get_open_telemetrys_variables_if_traces_are_sent():
    environment = {"OTEL_SERVICE_NAME": "mine", "HOME": "/root"}
    assert TracesConfig("http://localhost:4317").variables(environment) == {"OTEL_SERVICE_NAME": "mine"}
    assert TracesConfig().variables(environment) == {}
