"""A process of `embark serve` that answers requests, beside others that `worker_pool` started and tells what to do."""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from embark.errors import EmbarkError
from embark.export.scoring_device import ScoringDevice
from embark.serve.app import ModelServer, ServeLimits
from embark.serve.http_server import serve_requests
from embark.serve.loading import load_scorer
from embark.serve.process_channel import ProcessChannel, ProcessEnded
from embark.serve.request_rows import RequestScorer
from embark.serve.served_model import ServedModel, VersionChange
from embark.serve.version_follower import VersionSwitcher

CALL_S = 30.0  # That a process waits at most for what another answers at once.


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings that all processes of a server share."""

    place: str
    model_file: str
    name: str
    device: ScoringDevice
    limits: ServeLimits  # Limits of one process.
    token: str
    certificate: tuple[Path, Path] | None
    grpc_address: tuple[str, int] | None
    num_threads: int  # Threads of torch.


def run_worker(calls: Connection, handed: socket.socket, settings: WorkerSettings) -> None:
    """Run the process from start to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it gets Ctrl-C too
    gc.freeze()  # What was imported before the process was forked stays in memory that all of them share.
    try:
        _Worker(calls, handed, settings).run()
    finally:
        os._exit(0)  # a version that is being loaded is given up


class _Worker:
    def __init__(self, calls: Connection, handed: socket.socket, settings: WorkerSettings) -> None:
        self._handed, self._settings = handed, settings
        self._first: RequestScorer | None = None
        self._to_serve: queue.SimpleQueue[tuple[int | None, VersionChange | None]] = queue.SimpleQueue()
        self._started: Future[tuple[str, str]] = Future()
        self._model: ServedModel
        self._server: ModelServer
        self._switcher: VersionSwitcher | None = None
        answers: dict[str, Callable[..., Any]] = {
            "load": self._load, "serve": self._serve, "switch": lambda: self._known_switcher.switch(),
            "discard": lambda: self._known_switcher.discard(), "set_state": self._set_state,
            "report": lambda change: self._model.report(change),
            "metrics": lambda: list(self._server.metrics.registry.collect()),
            "window": lambda: self._server.traffic.take(),
            "version_event": lambda url, is_start: self._server.traffic.version_event(url, is_start=is_start),
            "feedback": lambda body: self._server.traffic.feedback.add(body)}
        self._channel = ProcessChannel(calls, answers, lambda: os.kill(os.getpid(), signal.SIGTERM))

    def run(self) -> None:
        """Serve what was loaded, once told to."""
        from embark.trainers.torch.scoring.cpu_model import num_threads

        current, refused = self._to_serve.get()
        assert self._first is not None
        settings, model = self._settings, ServedModel(self._first, self._settings.name)
        self._first = None  # its memory is released when another version takes over
        try:
            model.record_empty_request()
            model.current, model.refused = current, refused
            self._model, self._switcher = model, VersionSwitcher(model, self._open)
            self._server = server = ModelServer(model, settings.limits, settings.token, self)
            with server.traffic.running(None, ""), num_threads(settings.num_threads):
                serve_requests(server, settings.certificate, settings.grpc_address,
                               lambda _: self._started.set_result((model.name, model.device)), handed=self._handed)
        except EmbarkError as error:
            self._started.set_exception(error)
            return
        with suppress(ProcessEnded):
            self._channel.call("ended", server.traffic.take(), list(server.metrics.registry.collect()),
                               timeout_s=CALL_S)

    def metrics(self) -> bytes:
        """Return the metrics of all processes, or those of this one if the pool is gone."""
        try:
            found: bytes = self._channel.call("metrics", timeout_s=2 * CALL_S)
            return found
        except ProcessEnded:
            return self._server.metrics.text()

    def feedback(self, body: Mapping[str, Any]) -> int:
        """Pass on labels of a request that another process may have answered."""
        try:
            return int(self._channel.call("feedback", body, timeout_s=2 * CALL_S))
        except ProcessEnded:
            return 0

    @property
    def _known_switcher(self) -> VersionSwitcher:
        assert self._switcher is not None
        return self._switcher

    def _open(self, version: int, onto: RequestScorer | None) -> RequestScorer:
        settings = self._settings
        return load_scorer(settings.place, version, settings.model_file, settings.device, onto, is_checked=True)

    def _load(self, version: int) -> None:
        """Load a version beside the active one, if there is one."""
        if self._switcher:
            self._switcher.prepare(version)
        else:
            self._first = None
            self._first = self._open(version, None)

    def _serve(self, current: int | None, refused: VersionChange | None) -> tuple[str, str]:
        """Return the name of the model and where it runs, once it answers."""
        self._to_serve.put((current, refused))
        return self._started.result()

    def _set_state(self, current: int | None, refused: VersionChange | None) -> None:
        self._model.current, self._model.refused = current, refused
