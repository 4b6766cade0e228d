"""`embark serve`: an exported model behind HTTP and gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from embark.formatting import pluralize
from embark.spec.serve import DeviceKind, Precision, ScoringDevice
from .console import Console, OptionalInt

if TYPE_CHECKING:
    from embark.serve.endpoint import Listening
    from embark.serve.served_model import VersionChange


def serve(
    artifact: Annotated[str, Parameter(env_var="EMBARK_SERVE_ARTIFACT")], /, *,
    version: OptionalInt = None,
    model_file: Annotated[str, Parameter(env_var="EMBARK_SERVE_MODEL_FILE")] = "", name: str = "",
    device: DeviceKind = "auto", precision: Precision = "tf32", poll_s: float = 10.0,
    host: Annotated[str, Parameter(env_var="EMBARK_SERVE_HOST")] = "127.0.0.1",
    port: Annotated[int, Parameter(env_var=("EMBARK_SERVE_PORT", "AIP_HTTP_PORT"))] = 8000,
    grpc_port: OptionalInt = None, tls_cert: str = "", tls_key: str = "",
    workers: Annotated[int | None, Parameter(show_default=False, env_var="EMBARK_SERVE_WORKERS")] = None,
    max_queued_rows: int = 65_536, record: str = "", console: Console = Console()
) -> None:
    """Serve an exported model from this machine: /score for raw rows, Open Inference Protocol v2 by HTTP and gRPC.

    It switches to each new current version without failing a request, unless that is damaged or another model.

    SIGTERM or Ctrl-C ends it after every accepted request is answered. EMBARK_SERVE_TOKEN sets a bearer token.

    Parameters
    ----------
    artifact
        Where `embark export` wrote to: a folder or a URI.
    version
        This version of the artifact and no other; default: the current one.
    model_file
        The file of a custom model, as it was trained: an artifact holds no code.
    name
        What clients call the model; default: the name of its run, and versions of runs of another name are refused.
    device
        Where it runs; auto: on the GPU where there is one, by CUDA graphs, with its tables in the GPU's memory.
    precision
        Of the dense layers on a GPU; on a CPU they are fp32.
    poll_s
        Seconds between two looks for another current version; 0: never.
    host
        The address to listen on; 0.0.0.0 for all.
    port
        The port; 0: any free one.
    grpc_port
        The port for gRPC, 0: any free one; default: no gRPC.
    tls_cert
        The PEM file of a certificate with its chain: HTTPS, and gRPC over TLS.
    tls_key
        The PEM file of its private key; default: it is in the file of the certificate.
    workers
        Processes that answer, which share the tables' memory; default: one for each core and at most 8, on a GPU one.
    max_queued_rows
        Rows that may wait in all processes; further requests get status 429.
    record
        A folder to write the traffic to, which `embark watch` shows; one for all replicas.
    """
    from embark.serve.endpoint import Endpoint
    from embark.serve.server import NUM_THREADS, ServeLimits
    from embark.serve.server import serve as serve_model

    serve_model(artifact, version=version, model_file=model_file, name=name, poll_s=poll_s,
                device=ScoringDevice(device, precision),
                endpoint=Endpoint(host=host, port=port, grpc_port=grpc_port, tls_cert=tls_cert, tls_key=tls_key),
                limits=ServeLimits(num_threads=NUM_THREADS, max_queued_rows=max_queued_rows),
                on_start=lambda listening: console.show(listening, _render),
                on_change=lambda change: _report(console, change), record=record, workers=workers)


def _render(console: Console, listening: Listening) -> None:
    console.result(f"serving {listening.model}, version {listening.version}, on {listening.url}"
                   + (f" and {listening.grpc} (gRPC)" if listening.grpc else "")
                   + (" (with a bearer token)" if listening.needs_token else "")
                   + (f", by {listening.device}" if listening.device != "CPU" else "")
                   + (f", by {listening.workers} processes of "
                      f"{pluralize(listening.threads, 'thread')}" if listening.workers > 1 else ""))


def _report(console: Console, change: VersionChange) -> None:
    if console.json:
        console.show_line(change, repr)
    elif change.refused:
        which = "the current version" if change.version is None else f"version {change.version}"
        console.warning(f"{which} is refused, still serving version {change.previous}: {change.refused}"
                        + (f"\n  fix: {change.fix}" if change.fix else ""))
    else:
        content = f" with other content, {change.identity[:12]}," if change.version == change.previous else ""
        console.result(f"now serving version {change.version}{content} (was {change.previous})")
