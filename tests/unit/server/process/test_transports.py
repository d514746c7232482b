"""Real connections: TLS, Unix domain sockets, limits of headers, and the log of requests."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import Authority
from fake_engine import FakeEngine

from raycore.cli.engine_options import chosen_listen_options
from raycore.cli.main import build_parser
from raycore.errors import InvalidConfig
from raycore.server import ServerOptions, build_app
from raycore.server.listen_options import ListenOptions
from raycore.server.process.connection_log import WithoutPaths, configure_logging
from raycore.server.process.listening import handed_over, listen_unix, listening, shown_address, take_over
from raycore.server.process.serving import HttpServer
from raycore.server.process.tls import check_certificates

PROMPT = {"prompt": "27 + 58 ="}


@contextmanager
def served(options: ListenOptions, listener: socket.socket | None = None) -> Generator[str, None, None]:
    """Serve an engine. Yields the server's address."""
    with ExitStack() as stack:
        own = stack.enter_context(listening(options, is_shared=False)) if listener is None else listener
        server = HttpServer(build_app(FakeEngine(), ServerOptions(("fake",))), own, options)
        server.start()
        try:
            yield shown_address(options, own)
        finally:
            server.stop()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> tuple[Path, Path]:
    return authority.sign("server")


def secure(certificate: tuple[Path, Path], **options: Any) -> ListenOptions:
    return ListenOptions(port=0, ssl_certfile=str(certificate[0]), ssl_keyfile=str(certificate[1]), **options)


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.file))


def test_a_server_with_a_certificate_speaks_https_only(authority: Authority, certificate: tuple[Path, Path]) -> None:
    with served(secure(certificate)) as url:
        assert url.startswith("https://127.0.0.1:")
        answer = httpx.post(f"{url}/v1/completions", json=PROMPT, verify=trusting(authority))
        assert answer.json()["choices"][0]["text"] == " 85 is the answer"
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url.replace('https', 'http')}/health")


def test_clients_need_a_certificate_if_the_server_asks_for_one(
    authority: Authority, certificate: tuple[Path, Path]
) -> None:
    own = trusting(authority)
    own.load_cert_chain(*authority.sign("client"))
    with served(secure(certificate, ssl_ca_certs=str(authority.file), ssl_cert_reqs=2)) as url:
        assert httpx.get(f"{url}/health", verify=own).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/health", verify=trusting(authority))


def test_changed_certificates_are_read_again(authority: Authority, tmp_path: Path) -> None:
    files = tmp_path / "server.pem", tmp_path / "server.key"

    def install(of: Authority, name: str) -> None:
        for new, path in zip(of.sign(name), files, strict=True):
            shutil.copy(new, path)

    install(authority, "old")
    other = Authority(tmp_path, "other")
    with served(secure(files, enable_ssl_refresh=True)) as url:
        assert httpx.get(f"{url}/health", verify=trusting(authority)).status_code == 200
        files[0].write_text("half written")  # the old certificate stays
        for _ in range(3):
            assert httpx.get(f"{url}/health", verify=trusting(authority)).status_code == 200
        install(other, "new")
        for _ in range(100):
            try:
                assert httpx.get(f"{url}/health", verify=trusting(other)).status_code == 200
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        else:
            pytest.fail("the new certificate wasn't read")


def test_unusable_certificates_are_refused_before_anything_starts(
    authority: Authority, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    check_certificates(secure(certificate))
    check_certificates(ListenOptions())
    with pytest.raises(InvalidConfig, match=r"/no/such\.pem can't be read: No such file"):
        check_certificates(ListenOptions(ssl_certfile="/no/such.pem"))
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(InvalidConfig, match=r"the certificates in .*empty\.pem can't be used"):
        check_certificates(ListenOptions(ssl_certfile=str(tmp_path / "empty.pem")))
    with pytest.raises(InvalidConfig, match="can't be used"):
        check_certificates(secure((certificate[0], authority.sign("another")[1])))
    with pytest.raises(InvalidConfig, match="ssl_ciphers='NONE-SUCH' names no cipher"):
        check_certificates(secure(certificate, ssl_ciphers="NONE-SUCH"))
    for options, told in (
        ({"ssl_keyfile": "k"}, r"ssl_keyfile \(--ssl-keyfile\) needs ssl_certfile"),
        ({"enable_ssl_refresh": True}, "enable_ssl_refresh .* needs ssl_certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "ssl_cert_reqs=2 needs ssl_ca_certs"),
    ):
        with pytest.raises(InvalidConfig, match=told):
            ListenOptions(**options)


def test_a_unix_domain_socket_serves_and_is_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    left_behind = listen_unix(path)
    with pytest.raises(InvalidConfig, match=rf"can't listen on uds='{path}': another program uses it"):
        listen_unix(path)
    left_behind.close()
    with served(ListenOptions(uds=path)) as where:
        assert where == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
            answer = client.post("http://server/v1/completions", json=PROMPT | {"stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
    assert not os.path.exists(path)


def test_several_servers_share_a_unix_domain_socket(tmp_path: Path) -> None:
    options = ListenOptions(uds=str(tmp_path / "s"))
    with listening(options, is_shared=True) as listener, handed_over(listener) as at:
        assert os.stat(os.path.dirname(at)).st_mode & 0o077 == 0
        with served(options, take_over(at)), served(options, take_over(at)):
            for _ in range(4):
                with httpx.Client(transport=httpx.HTTPTransport(uds=options.uds)) as client:
                    assert client.get("http://server/health").status_code == 200
    with pytest.raises(OSError):
        take_over(at)


def test_a_socket_that_cannot_be_handed_over_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with socket.socket() as listener, pytest.raises(InvalidConfig, match="x" * 120), handed_over(listener):
        pass
    assert not list(deep.iterdir())


@pytest.mark.parametrize("path", ["{}/a_file", "{}/missing/s", "{}/" + "x" * 120, "{}/"])
def test_an_unusable_path_of_a_socket_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "a_file").write_text("")
    with (
        pytest.raises(InvalidConfig, match="uds='"),
        listening(ListenOptions(uds=path.format(tmp_path)), is_shared=False),
    ):
        pass
    assert (tmp_path / "a_file").exists()


def test_the_limits_of_headers_are_options() -> None:
    with served(ListenOptions(port=0, h11_max_header_count=12, h11_max_incomplete_event_size=4096)) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        answer = httpx.get(f"{url}/health", headers={f"x-{index}": "1" for index in range(13)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (431, "too_many_headers")
        answer = httpx.get(f"{url}/health", headers={"x-long": "x" * 4096})
        assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")


def logged(options: ListenOptions, capsys: pytest.CaptureFixture[str]) -> str:
    with served(options) as url:
        for path in ("/health", "/health?a=b", "/version"):
            httpx.get(f"{url}{path}")
    return capsys.readouterr().out


def test_requests_are_logged_from_level_info_on_except_for_the_excluded(capsys: pytest.CaptureFixture[str]) -> None:
    assert logged(ListenOptions(port=0), capsys) == ""
    own = logged(ListenOptions(port=0, uvicorn_log_level="info"), capsys)
    assert own.count("GET /health") == 2
    assert own.count("GET /version") == 1
    some = ListenOptions(port=0, uvicorn_log_level="info", disable_access_log_for_endpoints=("/health", "/metrics"))
    found = logged(some, capsys)
    assert ("GET /health" in found, "GET /version" in found) == (False, True)
    silent = ListenOptions(port=0, uvicorn_log_level="info", disable_uvicorn_access_log=True)
    assert logged(silent, capsys) == ""
    assert not any(isinstance(each, WithoutPaths) for each in logging.getLogger("uvicorn.access").filters)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str, str], str]:
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_logging_is_configured_by_a_file(written: Callable[[str, str], str], tmp_path: Path) -> None:
    logger = logging.getLogger("raycore.test_transports")
    before = logger.handlers[:]
    log = tmp_path / "log"
    config = {
        "version": 1,
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(log)}},
        "loggers": {"raycore.test_transports": {"handlers": ["file"], "level": "INFO"}},
    }
    try:
        for path in (written("c.json", json.dumps(config)), written("c.yaml", json.dumps(config))):
            configure_logging(path)
            logger.info("by %s", path[-4:])
        assert log.read_text().split() == ["by", "json", "by", "yaml"]
        assert not logging.getLogger("raycore.server.app").disabled
    finally:
        for handler in logger.handlers:
            handler.close()
        logger.handlers = before
    for name, text in (("a.json", "{"), ("b.yaml", "a: ["), ("c.json", "[]"), ("d.json", '{"version": 7}')):
        with pytest.raises(InvalidConfig, match=r"log_config_file='.*" + name):
            configure_logging(written(name, text))
    with pytest.raises(InvalidConfig, match="can't be read"):
        configure_logging("/no/such.json")


def test_the_flags_of_the_address_are_vllms() -> None:
    flags = ["--uds", "/s", "--disable-access-log-for-endpoints", "/health, /metrics", "--ssl-certfile", "c"]
    flags += ["--ssl-ca-certs", "a", "--ssl-cert-reqs", "2", "--enable-ssl-refresh", "--uvicorn-log-level", "debug"]
    flags += ["--h11-max-header-count", "9", "--h11-max-incomplete-event-size", "99"]
    flags += ["--header-timeout-s", "2.5", "--max-connections", "7"]
    options = chosen_listen_options(build_parser().parse_args(["serve", *flags, "--log-config-file", "l.json"]))
    assert options == ListenOptions(
        uds="/s",
        disable_access_log_for_endpoints=("/health", "/metrics"),
        ssl_certfile="c",
        ssl_ca_certs="a",
        ssl_cert_reqs=2,
        enable_ssl_refresh=True,
        uvicorn_log_level="debug",
        log_config_file="l.json",
        h11_max_header_count=9,
        h11_max_incomplete_event_size=99,
        header_timeout_s=2.5,
        max_connections=7,
    )
