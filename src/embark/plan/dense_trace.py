"""The dense layers of a network of the user's own: counted by running its code in a process that has torch."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import TypeAdapter

from embark.model.work import TRACED, DenseWork, dense_work_of
from embark.spec import RunSpec, to_toml

MODULE = "embark.trainers.torch.networks.trace_network"
LIMIT_S = 120.0


def trace_dense(spec: RunSpec) -> None:
    """Count them, unless that is done or the network is not the user's own."""
    if not spec.model.is_own or spec.model in TRACED:
        return
    with TemporaryDirectory(prefix="embark-trace-") as folder:
        answer = Path(folder, "answer.json")
        try:
            done = subprocess.run([sys.executable, "-P", "-m", MODULE, str(answer)], input=to_toml(spec).encode(),
                                  capture_output=True, timeout=LIMIT_S, check=False)
            TRACED[spec.model] = TypeAdapter(DenseWork).validate_json(answer.read_bytes())
        except subprocess.TimeoutExpired:
            TRACED[spec.model] = DenseWork(note=f"its dense layers are not counted: no answer within {LIMIT_S:.0f} s")
        except (OSError, ValueError):
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else f"the process ended with {done.returncode}"
            TRACED[spec.model] = DenseWork(note=f"its dense layers are not counted: {why}")


def dense_notes(spec: RunSpec) -> Iterator[str]:
    """What a plan has to say about them."""
    work = dense_work_of(spec.model)
    if isinstance(work, DenseWork) and work.note:
        yield f"{spec.model.kind}: {work.note}"
