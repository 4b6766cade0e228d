"""`embark serve`: the server's process, from opening the artifact to the last answer after SIGTERM."""

import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from embark.errors import MissingPackage, UserError
from embark.export.artifact import short_identity
from embark.run.host import usable_cores
from embark.spec.serve import ScoringDevice
from .endpoint import Endpoint, Listening, bearer_token, listen, shared_grpc_address

try:
    from .app import ModelServer
    from .app import ServeLimits as ServeLimits
    from .http_server import serve_requests
except ModuleNotFoundError as error:
    raise MissingPackage(f"embark serve needs {error.name}, which is not installed",
                         "pip install 'embark-rec[serve]'") from None
from .served_model import ServedModel, VersionChange
from .traffic import TrafficLog, about_version
from .version_poller import VersionPoller, load_first, load_scorer
from .worker import WorkerSettings
from .worker_pool import WorkerPool

MAX_WORKERS = 8  # Workers that are started unless more are asked for; torch's threads use the other cores.
NUM_THREADS = 2  # Scoring threads: one computes while the other reads its requests.
_WORKER_THREADS = 0  # Scoring threads of a worker: each worker has a core, and others read requests meanwhile.
_log = logging.getLogger("embark.serve")


def log_change(change: VersionChange) -> None:
    """Log what becomes of another current version."""
    if change.refused:
        _log.warning("version %s is refused, still serving %d: %s", change.version, change.previous, change.refused)
    else:
        _log.info("now serving version %d, %s (was %d)", change.version, short_identity(change.identity),
                  change.previous)


def serve(
    uri: str, *, version: int | None = None, model_file: str = "", name: str = "", poll_s: float = 10.0,
    device: ScoringDevice | None = None, endpoint: Endpoint | None = None, limits: ServeLimits | None = None,
    on_start: Callable[[Listening], None] = lambda _: None, on_change: Callable[[VersionChange], None] = log_change,
    record: str = "", workers: int | None = 1,
) -> None:
    """Serve an exported model until SIGTERM or Ctrl-C; then every accepted request is answered first. Every `poll_s`
    seconds the server looks for another current version and switches to it; never with 0 or a `version`. Without a
    `device` it runs on the GPU if there is one. `record` is a folder for the traffic, written as events in a folder of
    this server, which `embark watch` shows. `workers` is the number of processes that answer; by default one for each
    core, and one on a GPU. Several are started by `multiprocessing`, so a script needs `if __name__ == "__main__"`.
    With the environment variable `EMBARK_SERVE_TOKEN`, requests need this bearer token."""
    if not 0 <= poll_s <= threading.TIMEOUT_MAX:
        raise UserError(f"--poll-s {poll_s:g}: out of range", "seconds, such as 10; 0: never")
    if "://" in record:
        raise UserError(f"--record {record}: is no folder of this machine", "name a folder, or a mounted volume")
    limits, device = limits or ServeLimits(num_threads=NUM_THREADS), device or ScoringDevice()
    if limits.max_queued_rows < 1:
        raise UserError(f"--max-queued-rows {limits.max_queued_rows}: out of range", "at least one row")
    poll_s = 0.0 if version is not None else poll_s
    num_workers = workers_on(device) if workers is None else workers
    if num_workers < 1 or (num_workers > 1 and _has_gpu(device)):
        raise UserError(f"--workers {num_workers}: " + (
            "a GPU is served by one process" if num_workers > 1 else "is no number of processes"),
            "leave out --workers, or serve with --device cpu")
    load = partial(load_scorer, uri, model_file=model_file, device=device)
    endpoint = endpoint or Endpoint()
    if num_workers == 1:
        num_sharing = _share_cores(limits.num_threads)
        from embark.trainers.torch.scoring.cpu_model import shared_cores

        gc.freeze()  # The collector looks no more through what was imported, for tens of ms while requests wait.
        scorer, refused = load_first(uri, version, load)
        model = ServedModel(scorer, name, load)
        if scorer.model and scorer.model.is_quick:
            limits = replace(limits, num_threads=0)
        del scorer  # its memory is released when another version takes over
        model.record_empty_request()
        model.listeners.append(on_change)
        if refused:
            model.set_state(refused.version, refused)
        with VersionPoller(uri, model, poll_s).running(), shared_cores(num_sharing):
            serve_scorer(model, endpoint, limits, on_start, record)
        return
    load = partial(load, device=replace(device, kind="cpu"))
    token, certificate, num_threads = bearer_token(), endpoint.certificate, _threads_of_worker(num_workers)
    with shared_grpc_address(endpoint) as grpc_address:
        pool = WorkerPool(WorkerSettings(uri, name, load, limits_of_worker(limits, num_workers), token, certificate,
                                         grpc_address, num_threads), num_workers, on_change)
        try:
            name, where = pool.start(version)
            with listen(endpoint.host, endpoint.port) as listener:
                host, port = listener.getsockname()[:2]
                url, grpc = endpoint.urls(port, grpc_address and grpc_address[1])
                listening = Listening(url, grpc, name, pool.version, bool(token), where, num_workers, num_threads)
                with pool.polling(poll_s), pool.recording(_folder(record, port), f"{host}:{port}"):
                    pool.run(listener, lambda: on_start(listening))
        finally:
            pool.stop()


def workers_on(device: ScoringDevice) -> int:
    """Return how many processes answer fastest: one for each core of a CPU, one on a GPU."""
    return 1 if _has_gpu(device) else min(MAX_WORKERS, usable_cores())


def _has_gpu(device: ScoringDevice) -> bool:
    """Tell whether there is a GPU, without importing torch, which this process may not need."""
    return device.kind == "cuda" or (device.kind == "auto" and any(
        list(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "dxg")))


def limits_of_worker(limits: ServeLimits, num_workers: int) -> ServeLimits:
    """Return one process's share of what may wait, with room for at least one request."""
    queued, buffered = limits.max_queued_rows, limits.max_buffered_bytes
    return replace(limits, num_threads=_WORKER_THREADS,
                   max_buffered_bytes=max(buffered // num_workers, min(buffered, 2 * limits.max_body_bytes)),
                   max_queued_rows=max(queued // num_workers, min(queued, limits.max_request_rows)))


def _share_cores(num_threads: int) -> int:
    """Give each scoring thread its share of the cores before torch is imported, since not all of its libraries heed
    later settings. Return how many threads share those of torch."""
    if "torch" in sys.modules or "OMP_NUM_THREADS" in os.environ:
        return num_threads
    os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // num_threads))
    return 1


def _threads_of_worker(num_workers: int) -> int:
    """Return the number of torch's threads in a worker. It is set before workers start, since not all libraries heed
    later settings."""
    num = int(said) if (said := os.environ.get("OMP_NUM_THREADS", "")).isdigit() else usable_cores() // num_workers
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num)))
    return max(1, num)


def _folder(record: str, port: int) -> Path | None:
    """Return the folder for the traffic records of this server, next to the folders of other servers."""
    return Path(record).expanduser() / f"{socket.gethostname()}-{port}" if record else None


def serve_scorer(
    served: ServedModel, endpoint: Endpoint | None = None, limits: ServeLimits | None = None,
    on_start: Callable[[Listening], None] = lambda _: None, record: str = "",
) -> None:
    """Serve any scorer, and the versions that others switch it to."""
    endpoint, token = endpoint or Endpoint(), bearer_token()
    model, certificate = ModelServer(served, limits or ServeLimits(), token), endpoint.certificate
    with listen(endpoint.host, endpoint.port) as listener:
        host, port = listener.getsockname()[:2]

        def started(grpc_port: int | None) -> None:
            url, grpc = endpoint.urls(port, grpc_port)
            on_start(Listening(url, grpc, model.name, served.version, bool(token), served.scorer.device))

        log = TrafficLog()

        def changed(change: VersionChange) -> None:
            if change.refused:
                log.add_refused(change)
            else:
                log.add_version(about_version(served))

        model.metrics.registry.register(log)
        served.listeners.append(changed)
        with log.recording(_folder(record, port), f"{host}:{port}", about_version(served),
                           lambda: [model.traffic.take()]), model.traffic.running():
            grpc_address = None if endpoint.grpc_port is None else (endpoint.host, endpoint.grpc_port)
            serve_requests(model, certificate, grpc_address, started, listener=listener)
