"""What this machine's CPU does in a second, measured without torch in some tenths of one: the rates that a step's parts
are counted at."""

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

NUM_OPS = 2_000
NUM_FLOATS = 1 << 22  # Of each thread's copy.
MATRIX_SIZE = 768
LEAST_S = 0.05  # Each is measured for so long.
TEXT = "\n".join(f"def f{i}(a, b={i}, *c):\n    x = [a + {i} for a in c if a > b]\n    return {{'k': x, 'l': (a, b)}}"
                 for i in range(40))


@dataclass(frozen=True, slots=True)
class CpuRates:
    """Of all threads together, but for the small operation."""

    copy_bytes: float  # Read and written, a second.
    matmul_flops: float  # In fp32, a second.
    op_s: float  # Of an operation on a handful of values: what an interpreter and a library take to begin one.


def probe_cpu() -> CpuRates:
    """The best of some rounds: what else runs here only takes away."""
    import numpy as np

    num_threads = len(os.sched_getaffinity(0))
    values = [(np.ones(NUM_FLOATS, np.float32), np.empty(NUM_FLOATS, np.float32)) for _ in range(num_threads)]
    square, few = np.ones((MATRIX_SIZE, MATRIX_SIZE), np.float32), np.ones(8, np.float32)

    def add() -> None:
        for _ in range(NUM_OPS):
            few + few

    with ThreadPoolExecutor(num_threads) as pool:
        copy_s = _best_s(lambda: list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), values)))
    return CpuRates(copy_bytes=2 * num_threads * values[0][0].nbytes / copy_s,
                    matmul_flops=2.0 * MATRIX_SIZE**3 / _best_s(lambda: square @ square), op_s=_best_s(add) / NUM_OPS)


def probe_python_s(num_rounds: int = 5) -> float:
    """Of compiling a fixed text, the mean of some rounds' medians: what a host takes to start a GPU's many small
    operations rises and falls with it."""
    return statistics.mean(statistics.median(_compile_s() for _ in range(5)) for _ in range(num_rounds))


def _compile_s() -> float:
    began_s = time.perf_counter()
    compile(TEXT, "probe", "exec")
    return time.perf_counter() - began_s


def _best_s(call: Callable[[], object]) -> float:
    best_s, since_s = float("inf"), time.perf_counter()
    while (began_s := time.perf_counter()) < since_s + LEAST_S or best_s == float("inf"):
        call()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
