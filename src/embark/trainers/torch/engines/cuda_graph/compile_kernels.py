"""Compiles the Triton kernels of a step in parallel before any of them is launched."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any


def compile_in_parallel(step: Callable[[], object]) -> None:
    """Call `step` and compile the kernels that it launches in threads, or read them from disk, without launching them.

    Most of a compilation is LLVM, ptxas and a C compiler, which run beside each other. Whatever goes wrong here is
    ignored: the first launch of a kernel compiles it too, and its error is the one to be raised.
    """
    with suppress(Exception):
        from triton import AsyncCompileMode
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        launch: Any = JITFunction.run
        device, this_thread = driver.active.get_current_device(), threading.get_ident()

        def compile_only(kernel: Any, *args: Any, warmup: bool, **named: Any) -> Any:
            return launch(kernel, *args, warmup=warmup or threading.get_ident() == this_thread, **named)

        with ThreadPoolExecutor(thread_name_prefix="embark-compile", initializer=driver.active.set_current_device,
                                initargs=(device,)) as threads:
            JITFunction.run = compile_only
            try:
                with AsyncCompileMode(_Loading(threads), ignore_errors=True):
                    step()
            finally:
                JITFunction.run = launch


class _Loading:
    """Loads what it compiled onto the device too, for which some versions of Triton compile a C file first."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads

    def submit(self, compile_: Callable[[], Any], /) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = compile_()
            try:
                kernel.run  # noqa: B018
            except Exception:
                return compile_()  # one that nobody began to load, from disk
            return kernel

        return self._threads.submit(compile_and_load)
