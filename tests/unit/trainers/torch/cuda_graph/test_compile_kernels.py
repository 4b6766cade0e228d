"""Kernels are compiled in threads, for a GPU that need not be there, and a failure changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from limits import HANG_S

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

@triton.jit
def wrong(x):
    tl.store(x, not_there)
"""
COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompilationError, CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

from embark.trainers.torch.engines.cuda_graph.compile_kernels import compile_in_parallel
from kernels import double, wrong

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = set_current_device = lambda self, *_: 0

    def launcher_cls(self, *_):
        raise RuntimeError("there is no GPU")

driver.set_active(Hopper())
values, launch = MockTensor(tl.float32), JITFunction.run

def step(*others):
    for block in (64, 128, 64):
        double[(1,)](values, 7, BLOCK=block)  # could not be launched: there is no GPU
    for other in others:
        other[(1,)](values)

compile_in_parallel(step)
compiled = list(double.device_caches[0][0].values())
assert [type(kernel) for kernel in compiled] == [CompiledKernel] * 2
assert any(double.warmup(values, 7, BLOCK=64, grid=(1,)) is kernel for kernel in compiled)  # nothing is left to do
for _ in range(2):
    compile_in_parallel(lambda: step(wrong))
    assert JITFunction.run is launch
    assert double.warmup(values, 7, BLOCK=64, grid=(1,)).asm["cubin"]
    try:
        wrong.warmup(values, grid=(1,)).asm  # which a launch reads; some versions of Triton raise only then
    except CompilationError as error:
        assert "not_there" in str(error)
    else:
        raise AssertionError("wrong was compiled")
"""


def test_step_kernels_are_compiled_and_failures_left_to_the_launch(tmp_path: Path):
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "compile_them.py").write_text(COMPILE)
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "compile_them.py"], cwd=tmp_path, env=env, capture_output=True, text=True,
                          timeout=HANG_S)
    assert done.returncode == 0, done.stderr
