"""Work shared by processes that end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from embark.errors import Fault

T = TypeVar("T")
R = TypeVar("R")


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def each_result(call: Callable[[T], R], tasks: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
    """`call(task)` of every task, with the task's position, as they are done.

    With one worker it is done here. `call` and the tasks go to other processes, so they must pickle.
    """
    if num_workers <= 1 or len(tasks) <= 1:
        for position, task in enumerate(tasks):
            yield position, call(task)
        return
    # Not by fork: threads of this process may hold locks that a copy of it would wait for.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(num_workers, len(tasks)), mp_context=context, initializer=_begin)
    try:
        running: dict[Future[R], int] = {pool.submit(call, task): i for i, task in enumerate(tasks)}
        for done in as_completed(running):
            yield running[done], done.result()
        pool.shutdown(wait=True)
    except BrokenProcessPool:
        raise Fault("a worker process was ended from outside, for want of memory perhaps",
                    fix="set data.prepare.num_workers lower, or free some memory, and start again") from None
    finally:
        _end(pool)


def _begin() -> None:
    """A worker leaves Ctrl-C to its parent, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="embark-parent", daemon=True).start()


def _end(pool: ProcessPoolExecutor) -> None:
    workers: dict[int, Any] = dict(pool._processes or {})
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers.values():
        worker.terminate()
