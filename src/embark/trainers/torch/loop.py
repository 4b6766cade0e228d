"""The run, from top to bottom: one road for a CPU, a GPU, and many ranks under torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embark.data import Source, fit_spec, open_source, steps_per_epoch
from embark.events import Sink
from embark.run.budget import open_budget_guard, unwatched
from embark.run.checkpoint_schedule import CheckpointSchedule
from embark.run.clock import Clock
from embark.run.ending import end_run, finished_before, recorded_errors
from embark.run.logger import PredictLocal, RunLogger, log_prediction, log_start, open_run_logger
from embark.run.open_run import open_run
from embark.run.preemption_notices import NoticeWatch, detect_cloud, grace_seconds
from embark.run.saving import Saving
from embark.run.signals import StopSignals
from embark.run.stop import StopCoordinator
from embark.spec import RunSpec
from embark.store import RunDir, open_store
from embark.trainers.torch.batch import ToDevice, pinned
from embark.trainers.torch.build import Built, build
from embark.trainers.torch.checkpoint import Checkpointer
from embark.trainers.torch.device_memory import peak_bytes
from embark.trainers.torch.engines.cuda_graph.kernel_cache import keep_kernels_in
from embark.trainers.torch.engines.pipeline import Part
from embark.trainers.torch.evaluation import Evaluation
from embark.trainers.torch.faults import explain, refuse_trouble
from embark.trainers.torch.rank_rows import RankRows, first_trouble
from embark.trainers.torch.waiting import InputWaits
from embark.trainers.torch.world import World, check_against, join


def train(
    spec: RunSpec, view: Sequence[Sink] = (), *, fresh: bool = False, signals: StopSignals | None = None,
    foresee: PredictLocal | None = None,
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
        spec = fit_spec(spec, open_store=open_store)
        check_against(spec, world)
        source = open_source(spec, open_store=open_store, allocate=pinned(world.device))
        per_epoch = steps_per_epoch(source, spec.train.batch_size)
        num_steps = spec.train.num_steps or spec.train.num_epochs * per_epoch
        opened = open_run(spec, world, fresh=fresh)
        if opened.finished_step >= num_steps:
            return finished_before(opened.run_dir, opened.finished_step, view if world.is_first else ())
        with open_run_logger(spec, world, opened.run_dir, view) as logger, recorded_errors(logger, explain):
            keep_kernels_in(opened.run_dir.path)
            built = build(spec, world, num_steps, source)
            checkpointer = Checkpointer(spec, opened.run_dir, built, world)
            checkpoint = checkpointer.load_newest(logger.warn)
            step = checkpoint.step if checkpoint else 0
            log_start(logger, spec, world, opened.run_dir, source, built, step=step, num_steps=num_steps,
                       per_epoch=per_epoch)
            log_prediction(logger, spec, world, built, foresee)
            grace_s = spec.place.grace_s or grace_seconds(detect_cloud())
            saving = Saving(checkpointer, CheckpointSchedule(spec, step, grace_s), logger, step)
            purse = open_budget_guard(spec, opened.run_dir, saving.longest_s) if world.is_first else None
            together = StopCoordinator(signals, notices, world, purse)
            if note := unwatched(spec):
                logger.warn(note)
            try:
                return _loop(spec, world, opened.run_dir, source, built, logger, saving, together, step,
                             num_steps, per_epoch)
            finally:
                checkpointer.close()


def _loop(
    spec: RunSpec, world: World, run_dir: RunDir, source: Source, built: Built, logger: RunLogger, saving: Saving,
    together: StopCoordinator, step: int, num_steps: int, per_epoch: int,
) -> dict[str, Any]:
    to_device = ToDevice([t.name for t in spec.model.table_list()], world.device)
    evaluation = Evaluation(source, spec.train.batch_size, to_device, world)
    clock = Clock(spec.train.batch_size, InputWaits(world.device))
    evaluated: dict[str, Any] = {}
    decision = together.decide()
    part = Part(spec.train.batch_size, world.rank, world.world_size, start_step=step, stop_step=num_steps)
    with built.engine.feed(source, part) as fed, RankRows(spec, world, logger, clock) as ranks:
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
                logger.log("step", {"step": step, "epoch": (step - 1) // per_epoch, "loss": metrics["log_loss"],
                                   **metrics, "learning_rate": rate, **clock.window()})
                rows = ranks.gather(built.engine.trouble())
                ranks.tell(step, rows, is_last=is_last)
                refuse_trouble(metrics["log_loss"], first_trouble(rows), source, spec, step, per_epoch)
            elif clock.ticks():
                logger.tick({"step": step, "samples_per_s": clock.whole()["samples_per_s"]})
            if source.num_eval_samples and (is_last or _divides(spec.train.eval_every, step)):
                with clock.paused():
                    result = evaluation.run(built.engine, together.is_stopping)
                    built.optimizers.set_step(step)
                    if result:
                        evaluated = {"step": step, **result}
                        logger.log("eval", evaluated)
            with clock.agreeing():
                decision = together.decide(is_save_due=saving.is_due(step))
            if decision.is_save_due and not is_last and not decision.stop:
                with clock.paused():
                    saving.begin(step, evaluated, clock.step_s())
                if not spec.store.in_background:
                    saving.wait()
            saving.tell_done()
            if problem := together.new_problem():
                logger.log("note", {"level": "info", "text": problem})
    return end_run(spec, run_dir, world, logger, saving, clock, decision, evaluated, step=step, num_steps=num_steps,
                   peak_bytes=lambda: peak_bytes(world.device))


def _notices(spec: RunSpec, world: World) -> NoticeWatch:
    """One rank of each machine asks for all of its ranks."""
    return NoticeWatch(is_asking=spec.place.watch_notices and world.local_rank == 0)


def _divides(every: int, step: int) -> bool:
    return bool(every) and step % every == 0
