"""Where a server listens."""

import ctypes
import os
import select
import socket
import ssl
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from embark.errors import UserError
from embark.values import frozen

MAX_CONNECTIONS = 2_048
GRACE_S = 0.5  # After SIGTERM: handshakes that have begun are finished, and an open connection may send its request.
TOKEN = "EMBARK_SERVE_TOKEN"
_SO_ATTACH_FILTER = 26


@frozen
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
                raise UserError("--tls-key: has no --tls-cert", "name the certificate too")
            return None
        chain, key = Path(self.tls_cert), Path(self.tls_key or self.tls_cert)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, password="")
        except (OSError, ValueError) as error:
            raise UserError(f"--tls-cert {chain}, --tls-key {key}: cannot be used: "
                            f"{getattr(error, 'strerror', None) or error}",
                            "name PEM files: a certificate and its private key without a password") from None
        return chain, key


@frozen
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
                        "set it to the token alone, or unset it to serve without one")
    return token or ""


def listen(host: str, port: int) -> socket.socket:
    """Open the socket for HTTP."""
    if not host.strip():  # An empty host would be all addresses.
        raise UserError("--host: is empty", "127.0.0.1 for this machine alone, 0.0.0.0 for all addresses")
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                        backlog=MAX_CONNECTIONS)
        # Connections inherit it; otherwise a body of some 100 kB waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        raise UserError(f"{host}:{port}: cannot listen there: {getattr(error, 'strerror', None) or error}",
                        "choose another --port or --host") from None


def refuse_new_clients(port: int) -> None:
    """Drop the first packet of new clients of this process's port from now on. Clients that the kernel has accepted
    already, and those whose handshake is under way, can still be accepted; closing a socket that listens, or its
    `shutdown`, would reset them. Sockets that a library opened are found among all of the process."""
    # Classic BPF: load the TCP flags; a packet with SYN and without ACK is dropped, others pass.
    program = struct.pack("=" + 5 * "HBBI", 0x30, 0, 0, 13, 0x54, 0, 0, 0x12, 0x15, 0, 1, 0x02, 0x06, 0, 0, 0,
                          0x06, 0, 0, 0xFFFFFFFF)
    code = ctypes.create_string_buffer(program)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile; or a kernel without filters, where clients of this moment are reset
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port and \
                        one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER,
                                   struct.pack("HL", len(program) // 8, ctypes.addressof(code)))


def is_ready(file: int | socket.socket) -> bool:
    """Tell whether a socket has bytes that were not read or a client that was not accepted."""
    return bool(_events(file, select.POLLIN))


def is_writable(file: socket.socket) -> bool:
    """Tell whether a socket takes more bytes: its other end has room, and is not closed."""
    return _events(file, select.POLLOUT) == select.POLLOUT


def _events(file: int | socket.socket, wanted: int) -> int:
    poll = select.poll()
    poll.register(file, wanted)
    return next((events for _, events in poll.poll(0)), 0)


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
                        "choose another --grpc-port or --host") from None
    with held:
        yield endpoint.host, port
