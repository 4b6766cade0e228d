"""Tasks on an existing Ray cluster. Ray does a task again whose process or machine is lost."""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from embark import __version__
from embark.errors import EmbarkError, Fault, MissingPackage, UserError
from embark.formatting import to_one_line
from embark.values import JsonDict
from .workers import Report, Work

if TYPE_CHECKING:
    import ray

_MAX_RETRIES = 8  # Of a task whose process or machine is lost; more often, it is the task that ends them.
_CONNECT_S, _POLL_S, _SILENCE_S = 5.0, 5.0, 30.0
_MAX_QUEUED = 1_000  # What waits in Ray also tells an autoscaler how many machines there is work for.
_INSTALL = "install the same version of embark-rec, with its extras, on the driver and on all machines of the cluster"


class RayExecutor:
    """Runs each task on one core of the cluster, with `memory_bytes` reserved; at most `num_tasks` at once, or with 0
    as many as there is room for."""

    def __init__(self, work: Work, num_tasks: int, memory_bytes: int) -> None:
        self._work, self._num_tasks, self._memory_bytes = work, num_tasks or _MAX_QUEUED, memory_bytes
        self._is_ours = False
        self._asked_s = self._answered_s = time.monotonic()

    def __enter__(self) -> Self:
        try:
            import ray
        except ModuleNotFoundError:
            raise MissingPackage('data.prepare.executor = "ray" needs ray, which is not installed',
                                 "pip install 'embark-rec[ray]', in the version of the cluster") from None
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _connect(os.getenv("RAY_ADDRESS", "auto"))
        self._check_room(ray.nodes())  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        import ray

        if self._is_ours:
            ray.shutdown()  # which ends the tasks that run

    def run(self, tasks: Sequence[Any], report: Report) -> Iterator[tuple[Any, Any]]:
        """Yield each task with its result, in the order in which they end. `report` is called once for each."""
        import ray

        do = ray.remote(num_cpus=1, memory=self._memory_bytes, max_retries=_MAX_RETRIES)(_do)
        work, waiting = ray.put(self._work), iter(tasks)
        running: dict[ray.ObjectRef[Any], Any] = {}
        try:
            while True:
                for task in islice(waiting, self._num_tasks - len(running)):
                    running[do.remote(__version__, work, task)] = task
                if not running:
                    return
                ended = ray.wait(list(running), timeout=_POLL_S)[0]
                self._check_head()
                for done in ended:
                    task = running.pop(done)
                    result, sums = _result_of(done)
                    report(*sums)
                    yield task, result
        finally:
            for one in running:
                ray.cancel(one, force=True)

    def _check_head(self) -> None:
        """Fail if the cluster has had no head for a while. After a minute Ray would end this process."""
        import ray

        now_s = time.monotonic()
        if now_s - self._asked_s < _POLL_S:
            return
        address, self._asked_s = ray.get_runtime_context().gcs_address, now_s
        try:
            _reach(address)
            self._answered_s = now_s
        except OSError:
            if now_s - self._answered_s > _SILENCE_S:
                raise Fault(f"the head of the Ray cluster, {address}, does not answer any more",
                            "start the cluster again, then run the same command again: it goes on with the tasks "
                                "that are not done") from None

    def _check_room(self, nodes: Sequence[JsonDict]) -> None:
        """Refuse a cluster none of whose machines could ever do a task; one without cores may grow."""
        machines = [node["Resources"] for node in nodes if node["Alive"] and node["Resources"].get("CPU")]
        most_bytes = max((machine.get("memory", 0.0) for machine in machines), default=0.0)
        if machines and most_bytes < self._memory_bytes:
            raise UserError(
                f"no machine of the Ray cluster has {self._memory_bytes / 1e9:g} GB for a task; the largest gives its "
                f"tasks {most_bytes / 1e9:.2g} GB",
                "lower data.prepare.memory_gb, or start Ray with more: ray start --memory")


def _connect(address: str) -> None:
    import ray

    if address.startswith(("http://", "https://")):
        raise UserError(f"RAY_ADDRESS = {address} is the address of jobs; tasks go to another",
                        "set it to HOST:6379 on a machine of the cluster, or to ray://HOST:10001 elsewhere; or run "
                            "the command in the cluster: ray job submit -- embark data prepare …")
    try:
        _reach(address)  # Ray itself would try for minutes
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"no Ray cluster at {address}: {to_one_line(error)[:300]}",
                        "start one (ray start --head), or set RAY_ADDRESS to HOST:6379") from None


def _reach(address: str) -> None:
    """Raise `OSError` if nothing answers at `HOST:PORT`."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), _CONNECT_S).close()


def _result_of(reference: ray.ObjectRef[Any]) -> tuple[Any, tuple[int, int, int]]:
    import ray

    try:
        result, sums = ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # before its first line: what the task does itself is caught there
        last = str(error).strip().splitlines()[-1]
        raise UserError(f"a machine of the Ray cluster cannot run Embark {__version__}: {to_one_line(last)[:300]}",
                        _INSTALL) from None
    except ray.exceptions.RayError as error:
        raise Fault(f"Ray lost a task {_MAX_RETRIES + 1} times: {to_one_line(error)[:300]}",
                    "run the command again. If the system killed it for memory, raise data.prepare.memory_gb, "
                        "which keeps other tasks away, or use larger machines") from None
    if isinstance(result, EmbarkError | OSError):
        raise result
    return result, sums


def _do(version: str, work: Work, task: Any) -> tuple[Any, tuple[int, int, int]]:
    """Do a task on a machine of the cluster; return its result or error, and the sums of its reports."""
    sums = [0, 0, 0]

    def report(*more: int) -> None:
        for i, num in enumerate(more):
            sums[i] += num

    result: Any
    try:
        if version != __version__:
            raise UserError(f"a machine of the cluster has Embark {__version__}, the driver {version}", _INSTALL)
        result = work.do(task, report)()
    except (EmbarkError, OSError) as error:
        result = error
    except Exception:
        result = Fault(f"a task failed:\n{traceback.format_exc()}")
    return result, (sums[0], sums[1], sums[2])
