"""Triton's kernels on a CPU: its interpreter runs them as they are written."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def kernels():
    """Of dynamic tables, interpreted; on a machine with a GPU they would be compiled, and want its memory."""
    if torch.cuda.is_available():
        pytest.skip("test_gpu_dynamic.py has the compiled ones")
    assert os.environ["TRITON_INTERPRET"] == "1"
    from embark.trainers.torch.dynamic import map_kernels

    return map_kernels
