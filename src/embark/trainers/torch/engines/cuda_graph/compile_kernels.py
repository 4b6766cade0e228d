"""The Triton kernels of a step, compiled beside each other before any of them is launched."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def compile_in_parallel(step: Callable[[], object]) -> None:
    """Call `step` with the kernels that it launches compiled in threads, or read from disk, and not launched.

    Most of a compilation is LLVM and ptxas, which run beside each other. Whatever goes wrong here is ignored: the
    first launch of a kernel compiles it too, and its error is the one to be raised.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch: Any = JITFunction.run
    this_thread, called = threading.get_ident(), []

    def compile_only(kernel: Any, *args: Any, warmup: bool, **named: Any) -> Any:
        if threading.get_ident() == this_thread:
            called.append(kernel)
            warmup = True
        return launch(kernel, *args, warmup=warmup, **named)

    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(thread_name_prefix="embark-compile") as threads, AsyncCompileMode(threads):
            step()
    except Exception:
        for kernel in called:  # some versions of Triton keep what failed
            kernel.device_caches.clear()
    finally:
        JITFunction.run = launch
