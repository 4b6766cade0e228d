"""A process of `embark serve` that answers requests, beside others that `worker_pool` started and tells what to do."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from embark.errors import EmbarkError, Fault
from embark.serve.app import ModelServer, ServeLimits
from embark.serve.http_server import serve_requests
from embark.serve.request_rows import RequestScorer
from embark.serve.served_model import ServedModel, VersionChange
from embark.serve.version_poller import Load, VersionSwitcher

_log = logging.getLogger("embark.serve")


class ProcessEnded(Exception):
    """Raised if the other process is gone or does not answer in time."""


class ProcessChannel:
    """One end of a channel. Each process trusts what the other sends: one of them started the other."""

    def __init__(self, connection: Connection, answers: Mapping[str, Callable[..., Any]],
                 on_end: Callable[[], None] = lambda: None) -> None:
        """`answers` are the functions that the other process may call. `on_end` is called when it is gone."""
        self._connection, self._answers, self._on_end = connection, answers, on_end
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._has_ended = False
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="embark-call")
        threading.Thread(target=self._read, name="embark-channel", daemon=True).start()

    def call(self, name: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a function of the other process; raise what it raised."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            if self._has_ended:
                raise ProcessEnded(name)
            self._waiting[number] = answer
        self._send((number, name, args))
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise ProcessEnded(name) from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def close(self) -> None:
        """Close the channel, which the other process notices."""
        with suppress(OSError):
            self._connection.close()

    def _send(self, message: tuple[Any, ...]) -> None:
        with self._lock, suppress(OSError):  # the thread that reads notices
            self._connection.send(message)

    def _read(self) -> None:
        while True:
            try:
                number, name, value = self._connection.recv()
            except (OSError, EOFError):
                break
            if name:
                self._threads.submit(self._answer, number, name, value)
                continue
            with self._lock:
                waiting = self._waiting.get(number)
            if waiting and isinstance(value, BaseException):
                waiting.set_exception(value)
            elif waiting:
                waiting.set_result(value)
        with self._lock:
            self._has_ended = True
            waiting_for = list(self._waiting.values())
        for one in waiting_for:
            one.set_exception(ProcessEnded("the process ended"))
        self._threads.shutdown(wait=False)
        self._on_end()

    def _answer(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            value = self._answers[name](*args)
        except (EmbarkError, ValueError) as error:
            value = error
        except Exception:
            _log.exception("%s failed", name)
            value = Fault("internal error", fix="see the log")
        self._send((number, "", value))


CALL_S = 30.0  # Longest wait for what another process answers at once.


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings that all processes of a server share."""

    uri: str
    name: str  # Name of the model for clients; empty for the name of its run.
    load: Load
    limits: ServeLimits  # Limits of one process.
    token: str
    certificate: tuple[Path, Path] | None
    grpc_address: tuple[str, int] | None
    num_threads: int  # Threads of torch.


def run_worker(calls: Connection, handed: socket.socket, settings: WorkerSettings) -> None:
    """Run the process from start to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it gets Ctrl-C too
    gc.freeze()  # Modules imported before the fork stay in memory that all processes share.
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
        self._switcher: VersionSwitcher
        self._has_switcher = False
        answers: dict[str, Callable[..., Any]] = {
            "load": self._load, "serve": self._serve, "switch": lambda: self._switcher.switch(),
            "discard": lambda: self._switcher.discard(), "set_state": self._set_state,
            "report": lambda change: self._model.report(change),
            "metrics": lambda: list(self._server.metrics.registry.collect()),
            "window": lambda: self._server.traffic.take(),
            "version_event": lambda url, is_start: self._server.traffic.version_event(url, is_start=is_start),
            "feedback": lambda body: self._server.traffic.feedback.add(body)}
        self._channel = ProcessChannel(calls, answers, lambda: os.kill(os.getpid(), signal.SIGTERM))

    def run(self) -> None:
        """Serve the loaded model, once the pool says so."""
        from embark.trainers.torch.scoring.cpu_model import num_threads

        current, refused = self._to_serve.get()
        assert self._first is not None
        settings, model = self._settings, ServedModel(self._first, self._settings.name)
        self._first = None  # its memory is released when another version takes over
        try:
            model.record_empty_request()
            model.current, model.refused = current, refused
            self._model, self._switcher = model, VersionSwitcher(model, settings.load)
            self._has_switcher = True
            self._server = server = ModelServer(model, settings.limits, settings.token, self)
            with server.traffic.running(None, ""), num_threads(settings.num_threads):
                about = model.name, model.scorer.device
                serve_requests(server, settings.certificate, settings.grpc_address,
                               lambda _: self._started.set_result(about), handed=self._handed)
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

    def _load(self, version: int) -> None:
        """Load a version beside the active one, if there is one."""
        if self._has_switcher:
            self._switcher.prepare(version)
        else:
            self._first = None
            self._first = self._settings.load(version)

    def _serve(self, current: int | None, refused: VersionChange | None) -> tuple[str, str]:
        """Return the name of the model and where it runs, once it answers."""
        self._to_serve.put((current, refused))
        return self._started.result()

    def _set_state(self, current: int | None, refused: VersionChange | None) -> None:
        self._model.current, self._model.refused = current, refused
