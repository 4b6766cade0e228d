"""`embark serve`: the server's process, from opening the artifact to the last answer after SIGTERM."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from embark.errors import MissingPackage, UserError
from embark.export.scoring_device import ScoringDevice
from embark.run.host import usable_cores
from embark.serve.endpoint import Endpoint, Listening, bearer_token, listen, shared_grpc_address

try:
    from embark.serve.app import ModelServer, ServeLimits
    from embark.serve.http_server import serve_requests
except ModuleNotFoundError as error:
    raise MissingPackage(f"embark serve needs {error.name}, which is not installed",
                         fix="pip install 'embark-rec[serve]'") from None
from embark.serve.batcher import BatchLimits
from embark.serve.loading import load_current, load_scorer
from embark.serve.request_rows import RequestScorer
from embark.serve.served_model import ServedModel, VersionChange
from embark.serve.version_follower import VersionFollower, VersionSwitcher

MAX_WORKERS = 8  # That are started unless more are asked for; torch's threads use the other cores.
_NUM_THREADS = 2  # That score: one computes while the other reads its requests.
_WORKER_THREADS = 0  # Scoring threads of a worker: each worker has a core, and others read requests meanwhile.
_log = logging.getLogger("embark.serve")


def log_change(change: VersionChange) -> None:
    """Log what becomes of another current version."""
    if change.refused:
        _log.warning("version %s is refused, still serving %d: %s", change.version, change.previous, change.refused)
    else:
        _log.info("now serving version %d (was %d)", change.version, change.previous)


def serve(
    place: str, *, version: int | None = None, model_file: str = "", name: str = "", poll_s: float = 10.0,
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
        raise UserError(f"--poll-s {poll_s:g}: out of range", fix="seconds, such as 10; 0: never")
    if "://" in record:
        raise UserError(f"--record {record}: is no folder of this machine", fix="name a folder, or a mounted volume")
    limits, device, endpoint = limits or ServeLimits(num_threads=_NUM_THREADS), device or ScoringDevice(), \
        endpoint or Endpoint()
    num_workers = workers_on(device) if workers is None else workers
    if num_workers < 1 or (num_workers > 1 and _has_gpu(device)):
        raise UserError(f"--workers {num_workers}: " + (
            "a GPU is served by one process" if num_workers > 1 else "is no number of processes"),
            fix="leave out --workers, or serve with --device cpu")
    if num_workers > 1:
        from embark.serve.worker import WorkerSettings
        from embark.serve.worker_pool import WorkerPool

        token, certificate, num_threads = bearer_token(), endpoint.certificate, _threads_of_worker(num_workers)
        with shared_grpc_address(endpoint) as grpc_address:
            pool = WorkerPool(WorkerSettings(
                place=place, model_file=model_file, name=name, device=replace(device, kind="cpu"),
                limits=limits_of_worker(limits, num_workers), token=token, certificate=certificate,
                grpc_address=grpc_address, num_threads=num_threads), num_workers, on_change)
            try:
                model_name, where = pool.start(version)
                with listen(endpoint.host, endpoint.port) as listener:
                    host, port = listener.getsockname()[:2]
                    listening = Listening.of(endpoint, port, grpc_address and grpc_address[1], model=model_name,
                                             version=pool.version, needs_token=bool(token), device=where,
                                             workers=num_workers, threads=num_threads)
                    with pool.following(0 if version else poll_s), \
                            pool.recording(_folder(record, port), f"{host}:{port}"):
                        pool.run(listener, lambda: on_start(listening))
            finally:
                pool.stop()
        return
    num_sharing = _share_cores(limits.num_threads)
    from embark.trainers.torch.scoring.cpu_model import shared_cores

    def load(number: int | None, onto: RequestScorer | None = None) -> RequestScorer:
        return load_scorer(place, number, model_file, device, onto)

    gc.freeze()  # The collector looks no more through what was imported, for tens of ms while requests wait.
    scorer, refused = load_current(place, load) if version is None else (load(version), None)
    model = ServedModel(scorer, name)
    if scorer.model and scorer.model.is_quick:
        limits = replace(limits, num_threads=0)
    del scorer  # its memory is released when another version takes over
    model.record_empty_request()
    model.listeners.append(on_change)
    if refused:
        model.current, model.refused = refused.version, refused
        model.report(refused)
    follower = VersionFollower(place, model, VersionSwitcher(model, load), poll_s)
    with follower.running() if poll_s and version is None else nullcontext(), shared_cores(num_sharing):
        serve_scorer(model, endpoint, limits, on_start, record)


def workers_on(device: ScoringDevice) -> int:
    """Return how many processes answer fastest: one for each core of a CPU, one on a GPU."""
    return 1 if _has_gpu(device) else min(MAX_WORKERS, usable_cores())


def _has_gpu(device: ScoringDevice) -> bool:
    """Tell whether there is a GPU, without importing torch, which this process may not need."""
    return device.kind == "cuda" or (device.kind == "auto" and any(
        list(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "dxg")))


def limits_of_worker(limits: ServeLimits, num_workers: int) -> ServeLimits:
    """Return one process's share of what may wait, with room for at least one request."""
    queued, buffered = limits.batch.max_queued_rows, limits.max_buffered_bytes
    return replace(limits, num_threads=_WORKER_THREADS, max_buffered_bytes=max(
        buffered // num_workers, min(buffered, 2 * limits.max_body_bytes)), batch=replace(
        limits.batch, max_queued_rows=max(queued // num_workers, min(queued, limits.max_request_rows))))


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


def serve_limits(*, max_wait_ms: float, max_queued_rows: int) -> ServeLimits:
    """Return the default limits with these two changed."""
    if not 0 <= max_wait_ms <= 10_000 or max_queued_rows < 1:
        raise UserError(f"--max-wait-ms {max_wait_ms:g}, --max-queued-rows {max_queued_rows}: out of range",
                        fix="0 to 10,000 ms, and at least one row")
    return ServeLimits(batch=BatchLimits(max_wait_ms=max_wait_ms, max_queued_rows=max_queued_rows),
                       num_threads=_NUM_THREADS)


def _folder(record: str, port: int) -> Path | None:
    """Return the folder for the traffic of this server, beside those of others."""
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
        with model.traffic.running(_folder(record, port), f"{host}:{port}"):
            serve_requests(model, certificate, endpoint.grpc_address, lambda grpc_port: on_start(Listening.of(
                endpoint, port, grpc_port, model=model.name, version=served.version, needs_token=bool(token),
                device=served.device)), listener=listener)


