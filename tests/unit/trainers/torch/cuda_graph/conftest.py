"""Triton's kernels on a CPU: its interpreter runs them as they are written, one program after the other."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def kernels():
    """The modules of kernels, interpreted; on a machine with a GPU they would be compiled, and want its memory."""
    if torch.cuda.is_available():
        pytest.skip("test_gpu.py has the compiled ones")
    assert os.environ["TRITON_INTERPRET"] == "1"
    from embark.trainers.torch.engines.cuda_graph import dense_kernels, table_kernels

    return table_kernels, dense_kernels
