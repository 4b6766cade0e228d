"""The run, from top to bottom: one road for a CPU, a GPU, and many ranks under torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embark.data import Source, fit_spec, open_source, steps_per_epoch
from embark.spec import RunSpec
from embark.store import RunDir, open_door
from embark.train.batch import ToDevice, pinned
from embark.train.build import Built, build
from embark.train.captured.kernel_cache import keep_kernels_in
from embark.train.checkpoint import Checkpointer
from embark.train.clock import Clock
from embark.train.device_memory import peak_bytes
from embark.train.ending import end_run, finished_before, recorded_errors
from embark.train.engine import Part
from embark.train.evaluation import Evaluation
from embark.train.faults import explain, refuse_trouble
from embark.train.notices import NoticeWatch, detect_cloud, grace_seconds
from embark.train.pace import Pace
from embark.train.purse import open_purse, unwatched
from embark.train.rank_rows import RankRows, first_trouble
from embark.train.run import open_run
from embark.train.saving import Saving
from embark.train.signals import StopSignals
from embark.train.stopping import Together
from embark.train.telling import Foresee, Telling, tell_foresight, tell_start, telling
from embark.train.waiting import InputWaits
from embark.train.world import World, check_against, join
from embark.watch import Sink


def train(
    spec: RunSpec, view: Sequence[Sink] = (), *, fresh: bool = False, signals: StopSignals | None = None,
    foresee: Foresee | None = None,
) -> dict[str, Any]:
    """Train what `spec` says; returns the values of the last evaluation and of the end.

    The same call begins a run, goes on with one that was stopped, and leaves a finished one alone.
    `view` is what a person watches; `signals`, entered before, has listened since before torch was there; `foresee`
    says what the run should take on this machine, and is told beside what it took.
    """
    if signals is None:
        with StopSignals() as entered:
            return train(spec, view, fresh=fresh, signals=entered, foresee=foresee)
    with join(spec.place) as world, _notices(spec, world) as notices:
        spec = fit_spec(spec, open_door=open_door)
        check_against(spec, world)
        source = open_source(spec, open_door=open_door, allocate=pinned(world.device))
        per_epoch = steps_per_epoch(source, spec.train.batch_size)
        num_steps = spec.train.num_steps or spec.train.num_epochs * per_epoch
        opened = open_run(spec, world, fresh=fresh)
        if opened.finished_step >= num_steps:
            return finished_before(opened.run_dir, opened.finished_step, view if world.is_first else ())
        with telling(spec, world, opened.run_dir, view) as told, recorded_errors(told, explain):
            keep_kernels_in(opened.run_dir.path)
            built = build(spec, world, num_steps, source)
            checkpointer = Checkpointer(spec, opened.run_dir, built, world)
            checkpoint = checkpointer.load_newest(told.warn)
            step = checkpoint.step if checkpoint else 0
            tell_start(told, spec, world, opened.run_dir, source, built, step=step, num_steps=num_steps,
                       per_epoch=per_epoch)
            tell_foresight(told, spec, world, built, foresee)
            grace_s = spec.place.grace_s or grace_seconds(detect_cloud())
            saving = Saving(checkpointer, Pace(spec, step, grace_s), told, step)
            purse = open_purse(spec, opened.run_dir, saving.longest_s) if world.is_first else None
            together = Together(signals, notices, world, purse)
            if note := unwatched(spec):
                told.warn(note)
            try:
                return _loop(spec, world, opened.run_dir, source, built, told, saving, together, step,
                             num_steps, per_epoch)
            finally:
                checkpointer.close()


def _loop(
    spec: RunSpec, world: World, run_dir: RunDir, source: Source, built: Built, told: Telling, saving: Saving,
    together: Together, step: int, num_steps: int, per_epoch: int,
) -> dict[str, Any]:
    to_device = ToDevice([t.name for t in spec.model.table_list()], world.device)
    evaluation = Evaluation(source, spec.train.batch_size, to_device, world)
    clock = Clock(spec.train.batch_size, InputWaits(world.device))
    evaluated: dict[str, Any] = {}
    decision = together.decide()
    part = Part(spec.train.batch_size, world.rank, world.world_size, start_step=step, stop_step=num_steps)
    with built.engine.feed(source, part) as fed, RankRows(spec, world, told, clock) as ranks:
        batches = clock.timed(fed)
        while step < num_steps and not decision.stop:
            rate = built.optimizers.set_rates(step)
            with ranks.looking():
                built.engine.step(batches, step)
            step += 1
            clock.step()
            ranks.stepped()
            is_last = step == num_steps
            if step % spec.watch.every == 0 or is_last:
                metrics = built.window.take(world)
                told.tell("step", {"step": step, "epoch": (step - 1) // per_epoch, "loss": metrics["log_loss"],
                                   **metrics, "learning_rate": rate, **clock.window()})
                rows = ranks.gather(built.engine.trouble())
                ranks.tell(step, rows, is_last=is_last)
                refuse_trouble(metrics["log_loss"], first_trouble(rows), source, spec, step, per_epoch)
            elif clock.ticks():
                told.tick({"step": step, "samples_per_s": clock.whole()["samples_per_s"]})
            if source.num_eval_samples and (is_last or _divides(spec.train.eval_every, step)):
                with clock.paused():
                    result = evaluation.run(built.engine, together.is_stopping)
                    built.optimizers.set_step(step)
                    if result:
                        evaluated = {"step": step, **result}
                        told.tell("eval", evaluated)
            with clock.agreeing():
                decision = together.decide(is_save_due=saving.is_due(step))
            if decision.is_save_due and not is_last and not decision.stop:
                with clock.paused():
                    saving.begin(step, evaluated, clock.step_s())
                if not spec.store.in_background:
                    saving.wait()
            saving.tell_done()
            if problem := together.new_problem():
                told.tell("note", {"level": "info", "text": problem})
    return end_run(spec, run_dir, world, told, saving, clock, decision, evaluated, step=step, num_steps=num_steps,
                   peak_bytes=lambda: peak_bytes(world.device))


def _notices(spec: RunSpec, world: World) -> NoticeWatch:
    """One rank of each machine asks for all of its ranks."""
    return NoticeWatch(is_asking=spec.place.watch_notices and world.local_rank == 0)


def _divides(every: int, step: int) -> bool:
    return bool(every) and step % every == 0
