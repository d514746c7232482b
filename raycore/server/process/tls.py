"""Checks certificates before a server starts, and reads them again when they change."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from pathlib import Path

from raycore.errors import InvalidConfig
from raycore.server.listen_options import ListenOptions

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0


def check_certificates(options: ListenOptions) -> None:
    """Read the files of certificates, as the server will.

    Raises:
        InvalidConfig: a file can't be read or has no certificate, the key is another certificate's, or no cipher has
            one of the names.
    """
    if options.ssl_certfile is None:
        return
    for path in options.certificate_files:
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise InvalidConfig(f"{path} can't be read: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        load_certificates(context, options)
    except (ssl.SSLError, OSError) as error:
        files = ", ".join(options.certificate_files)
        raise InvalidConfig(
            f"the certificates in {files} can't be used ({error}): give PEM files of a certificate and of its own key"
        ) from error
    if options.ssl_ciphers is not None:
        try:
            context.set_ciphers(options.ssl_ciphers)
        except ssl.SSLError as error:
            raise InvalidConfig(f"ssl_ciphers={options.ssl_ciphers!r} names no cipher: {error}") from error


def load_certificates(context: ssl.SSLContext, options: ListenOptions) -> None:
    """Read the certificates into a context. Raises ssl.SSLError or OSError."""
    assert options.ssl_certfile is not None
    context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, lambda: "")  # rather than ask at the terminal
    if options.ssl_ca_certs is not None:
        context.load_verify_locations(options.ssl_ca_certs)


class CertificateWatch:
    """Reads certificates into a context again when their files change, on a thread of its own."""

    def __init__(self, context: ssl.SSLContext, options: ListenOptions) -> None:
        self._context = context
        self._options = options
        self._seen = self._state()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raycore-certificates", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopping.set()

    def check(self) -> bool:
        """Read the files if they have changed. Returns whether new certificates count from now on."""
        now = self._state()
        if now == self._seen:
            return False
        self._seen = now
        try:
            load_certificates(self._context, self._options)
        except (ssl.SSLError, OSError) as error:  # a file may be half written: its next change is another chance
            logger.warning("changed certificates can't be used, and the old ones stay: %s", error)
            return False
        logger.info("certificates were read again")
        return True

    def _state(self) -> list[tuple[int, int, int] | None]:
        states: list[tuple[int, int, int] | None] = []
        for path in self._options.certificate_files:
            try:
                found = os.stat(path)
                states.append((found.st_ino, found.st_size, found.st_mtime_ns))
            except OSError:
                states.append(None)
        return states

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            self.check()
