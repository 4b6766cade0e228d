"""A checkpoint of a run and the spec it was trained by: what evaluation and export begin with."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from embark.errors import UserError
from embark.spec import RunSpec, resolve
from embark.spec.run import DATA, KEY
from embark.store.checkpoint_inspect import list_checkpoints
from embark.store.checkpoint_store import Checkpoint, best_step_of
from embark.store.run_dir import SPEC, RunDir, find_run

_AT = re.compile(r"(.+)@(\d+|best)")


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A checkpoint, and the spec that was saved with it."""

    run_dir: RunDir
    checkpoint: Checkpoint
    spec: RunSpec
    best_step: int | None = None  # Of a run with early stopping, where it has that checkpoint.

    @property
    def fingerprint(self) -> str:
        """Of the data it was trained on."""
        return str((self.checkpoint.values.get(KEY) or {}).get(DATA, ""))


def find_trained(run: str, step: int | None = None, sets: Sequence[str] = ()) -> TrainedRun:
    """The newest checkpoint of a run, or that of `step`; `RUN@best` and `RUN@STEP` name one too. `sets` are `key=value`
    settings over its spec."""
    run, which = split_run(run)
    if which and step is not None:
        raise UserError(f"{run}@{which} and step {step} name two checkpoints", fix="name one")
    run_dir = find_run(run)
    listed = list_checkpoints(run_dir)
    committed = [one.committed for one in listed.checkpoints if one.committed]
    if not committed:
        raise UserError(f"{run_dir.uri}: has no checkpoint", fix="train it with store.checkpoint_at_end = true")
    if which == "best":
        checkpoint = listed.best()
    else:
        step = int(which) if which else step
        checkpoint = committed[-1] if step is None else listed.committed(step)
    store = run_dir.checkpoints.store
    path = f"{checkpoint.name}/{SPEC}"
    text = store.read(path).decode("utf-8", "replace")
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{store.where(path)}: cannot be read: {error}",
                        fix="name another checkpoint with --step; `embark checkpoints RUN` lists them") from None
    best = best_step_of(committed[-1])
    return TrainedRun(run_dir, checkpoint, resolve(raw, sets, where=store.where(path), text=text),
                      best if best in {one.step for one in committed} else None)


def split_run(word: str) -> tuple[str, str]:
    """`RUN@best` and `RUN@12` as the run and its checkpoint; of any other word the second is empty."""
    match = _AT.fullmatch(word)
    return (match[1], match[2]) if match else (word, "")
