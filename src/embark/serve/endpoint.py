"""Where a server listens."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from embark.errors import UserError

MAX_CONNECTIONS = 2_048
TOKEN = "EMBARK_SERVE_TOKEN"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address, ports and certificate of a server."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None  # None: no gRPC.
    tls_cert: str = ""  # A PEM file with the certificate and those between it and the root; empty: no TLS.
    tls_key: str = ""  # A PEM file with its private key; empty: it is in `tls_cert`.

    def urls(self, port: int, grpc_port: int | None) -> tuple[str, str | None]:
        """Return the addresses of HTTP and gRPC with the ports that the server was given."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        grpc = None if grpc_port is None else f"{host}:{grpc_port}"
        return f"{'https' if self.tls_cert else 'http'}://{host}:{port}", grpc

    @property
    def certificate(self) -> tuple[Path, Path] | None:
        """The certificate and its key, which match."""
        if not self.tls_cert:
            if self.tls_key:
                raise UserError("--tls-key: has no --tls-cert", fix="name the certificate too")
            return None
        chain, key = Path(self.tls_cert), Path(self.tls_key or self.tls_cert)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, password="")
        except (OSError, ValueError) as error:
            raise UserError(f"--tls-cert {chain}, --tls-key {key}: cannot be used: "
                            f"{getattr(error, 'strerror', None) or error}",
                            fix="name PEM files: a certificate and its private key without a password") from None
        return chain, key


@dataclass(frozen=True, slots=True)
class Listening:
    """Describes a server that accepts requests."""

    url: str
    grpc: str | None  # Host and port, where it has gRPC.
    model: str
    version: int
    needs_token: bool
    device: str  # Device and method of scoring, for people to read.
    workers: int = 1  # Processes that answer.
    threads: int = 0  # Threads of torch in each of several processes.


def bearer_token() -> str:
    """Return the token of the environment; empty if it is not set."""
    token = os.environ.get(TOKEN)
    if token is not None and (not token or token != token.strip()):
        raise UserError(f"{TOKEN}: is set, but empty or with whitespace around it",
                        fix="set it to the token alone, or unset it to serve without one")
    return token or ""


def listen(host: str, port: int) -> socket.socket:
    """Open the socket for HTTP."""
    if not host.strip():  # An empty host would be all addresses.
        raise UserError("--host: is empty", fix="127.0.0.1 for this machine alone, 0.0.0.0 for all addresses")
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                        backlog=MAX_CONNECTIONS)
        # Connections inherit it; otherwise a body of some 100 kB waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        raise UserError(f"{host}:{port}: cannot listen there: {getattr(error, 'strerror', None) or error}",
                        fix="choose another --port or --host") from None


@contextmanager
def shared_grpc_address(endpoint: Endpoint) -> Iterator[tuple[str, int] | None]:
    """Reserve an address on which several processes may listen for gRPC; None if the server has no gRPC."""
    if endpoint.grpc_port is None:
        yield None
        return
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    try:
        with socket.create_server((endpoint.host, endpoint.grpc_port), family=family) as free:
            host, port = free.getsockname()[:2]
        held = socket.socket(family)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except (OSError, OverflowError):
        raise UserError(f"{endpoint.host}:{endpoint.grpc_port}: cannot listen there for gRPC",
                        fix="choose another --grpc-port or --host") from None
    with held:
        yield endpoint.host, port
