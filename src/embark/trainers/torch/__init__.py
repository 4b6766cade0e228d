"""The TorchRec trainer: with `torchrun`, the only package that imports torch. May import run and below."""

import logging
import os
import warnings

from . import lazy_imports

lazy_imports.install()
# OpenMP's threads spin while they wait. Beside any other busy process that makes a step on a CPU twenty times
# slower (bench/LOG.md), so they give up soon. torch reads it as it loads, hence here.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
# On ARM oneDNN writes a map of its kernels to /tmp/perf-PID.map for profilers, and nobody removes it.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")

_NO_NEWS = ("_fbgemm_torch_compat_table has no entry", "Could not determine LOCAL_WORLD_SIZE")

# What torch and TorchRec say about their own insides is no news to those who train with them.
if not os.environ.get("EMBARK_TORCH_WARNINGS"):
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(torch|torchrec|fbgemm_gpu|tensordict)\b")
    for name in ("torchrec", "torch.fx._symbolic_trace", "MethodLogger-NullHandler", "Cap01Logger-NullHandler"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().addFilter(lambda record: not any(text in record.getMessage() for text in _NO_NEWS))
