"""Many at a time."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def for_each_parallel(call: Callable[[T], None], items: Sequence[T], parallel: int) -> None:
    """Call it for each item, `parallel` at a time; after a failure no further one is begun."""
    if len(items) <= 1 or parallel <= 1:
        for item in items:
            call(item)
        return
    with ThreadPoolExecutor(min(parallel, len(items)), thread_name_prefix="embark-store") as pool:
        running = [pool.submit(call, item) for item in items]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    for done in running:
        if not done.cancelled():
            done.result()
