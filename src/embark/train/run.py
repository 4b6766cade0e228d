"""Which directory a run goes into, and whether it begins, goes on or is finished already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embark.errors import EmbarkError, UserError
from embark.spec import RunSpec, load_spec
from embark.store import Checkpoint, RunDir, numbered, read_checkpoint
from embark.train.world import World
from embark.watch import read_events


@dataclass(frozen=True, slots=True)
class Opened:
    """A run's directory, and what to go on from."""

    run_dir: RunDir
    checkpoint: Checkpoint | None
    finished_step: int
    """Steps of a run that ended by itself; 0 where it did not."""


def open_run(spec: RunSpec, world: World, *, fresh: bool) -> Opened:
    """Rank 0 looks and decides; the others are told, so that all see the same."""
    decided = ["", "", "0", ""]
    if world.is_first:
        try:
            opened = _decide(spec, fresh=fresh)
            checkpoint = str(opened.checkpoint.path) if opened.checkpoint else ""
            decided = [str(opened.run_dir.path), checkpoint, str(opened.finished_step), ""]
        except EmbarkError as error:
            decided[3] = f"{error.what}\0{error.fix}"
    path, checkpoint, finished_step, error_text = world.agree("\n\n".join(decided)).split("\n\n", 3)
    if error_text:
        what, _, fix = error_text.partition("\0")
        raise UserError(what, fix=fix)
    return Opened(RunDir(Path(path)), read_checkpoint(Path(checkpoint)) if checkpoint else None, int(finished_step))


def _decide(spec: RunSpec, *, fresh: bool) -> Opened:
    path = Path(spec.store.root).expanduser() / spec.name
    run_dir = RunDir(numbered(path) if fresh else path)
    checkpoint: Checkpoint | None = None
    finished_step = 0
    if run_dir.spec.is_file():
        _refuse_another_run(run_dir, spec)
        checkpoint = run_dir.newest()
        finished_step = _finished_step(run_dir)
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{run_dir.path}: {error.strerror}", fix="set store.root to a writable directory") from error
    return Opened(run_dir, checkpoint, finished_step)


def _refuse_another_run(run_dir: RunDir, spec: RunSpec) -> None:
    """Going on with other tables or other data would spoil both runs."""
    before = load_spec(str(run_dir.spec))
    other = [
        f"{section}.{name}"
        for section, names in _must_match(spec).items()
        for name in names
        if getattr(getattr(before, section), name) != getattr(getattr(spec, section), name)
    ]
    if other:
        raise UserError(
            f"{run_dir.path} holds a run with another {', '.join(other)}",
            fix="--fresh begins a new directory beside it; or choose another --set name=…",
        )


def _must_match(spec: RunSpec) -> dict[str, list[str]]:
    return {
        "model": list(type(spec.model).model_fields),
        "data": list(type(spec.data).model_fields),
        "train": ["batch_size", "optimizer", "dense_optimizer", "table_dtype", "seed"],
    }


def _finished_step(run_dir: RunDir) -> int:
    if not run_dir.events.is_file():
        return 0
    ends = [e for e in read_events(run_dir.events) if e.kind in ("end", "start")]
    if not ends or ends[-1].kind != "end" or ends[-1].values.get("outcome") != "done":
        return 0
    return int(ends[-1].values["step"])
