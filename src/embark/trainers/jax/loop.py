"""The run, from top to bottom: one road for TPUs, GPUs and a CPU's virtual devices, on one host or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax

from embark.data import Source, fit_spec, open_source, steps_per_epoch
from embark.events import Sink
from embark.run.budget import open_budget_guard, unwatched
from embark.run.checkpoint_schedule import CheckpointSchedule
from embark.run.clock import Clock
from embark.run.ending import end_run, finished_before, recorded_errors
from embark.run.logger import PredictLocal, RunLogger, log_prediction, log_start, open_run_logger
from embark.run.open_run import open_run
from embark.run.preemption_notices import NoticeWatch, detect_cloud, grace_seconds
from embark.run.rank_times import RankTimes
from embark.run.saving import Saving
from embark.run.signals import StopSignals
from embark.run.stop import StopCoordinator
from embark.spec import RunSpec
from embark.store import RunDir, open_store
from embark.trainers.jax.checkpoint import Checkpointer
from embark.trainers.jax.evaluation import Evaluation
from embark.trainers.jax.faults import explain, peak_bytes
from embark.trainers.jax.prefetch import train_batches
from embark.trainers.jax.trainer import JaxTrainer
from embark.trainers.jax.world import World, check_against, join
from embark.trainers.torch.faults import refuse_trouble


def train(
    spec: RunSpec, view: Sequence[Sink] = (), *, fresh: bool = False, signals: StopSignals | None = None,
    foresee: PredictLocal | None = None,
) -> dict[str, Any]:
    """Train what `spec` says; returns the values of the last evaluation and of the end.

    The same call begins a run, goes on with one that was stopped, here or by the torch trainer, and leaves a finished
    one alone. `view` is what a person watches; `signals`, entered before, has listened since before jax was there;
    `foresee` says what the run should take here.
    """
    if signals is None:
        with StopSignals() as entered:
            return train(spec, view, fresh=fresh, signals=entered, foresee=foresee)
    with join(spec.place) as world, NoticeWatch(is_asking=spec.place.watch_notices) as notices:
        spec = fit_spec(spec, open_store=open_store)
        check_against(spec, world)
        source = open_source(spec, open_store=open_store)
        per_epoch = steps_per_epoch(source, spec.train.batch_size)
        num_steps = spec.train.num_steps or spec.train.num_epochs * per_epoch
        opened = open_run(spec, world, fresh=fresh)
        if opened.finished_step >= num_steps:
            return finished_before(opened.run_dir, opened.finished_step, view if world.is_first else ())
        with open_run_logger(spec, world, opened.run_dir, view) as logger, recorded_errors(logger, explain):
            _keep_programs_in(opened.run_dir, world)
            built = JaxTrainer(spec, world, num_steps, source)
            checkpointer = Checkpointer(spec, opened.run_dir, built)
            try:
                checkpoint = checkpointer.begin_from_newest(logger.warn)
                step = checkpoint.step if checkpoint else 0
                log_start(logger, spec, _shown(world), opened.run_dir, source, built, step=step, num_steps=num_steps,
                           per_epoch=per_epoch)
                log_prediction(logger, spec, _shown(world), built, foresee)
                grace_s = spec.place.grace_s or grace_seconds(detect_cloud())
                saving = Saving(checkpointer, CheckpointSchedule(spec, step, grace_s), logger, step)
                purse = open_budget_guard(spec, opened.run_dir, saving.longest_s) if world.is_first else None
                together = StopCoordinator(signals, notices, world, purse)
                if note := unwatched(spec):
                    logger.warn(note)
                return _loop(spec, opened.run_dir, source, built, logger, saving, together,
                             _Steps(step, num_steps, per_epoch))
            finally:
                checkpointer.close()


@dataclass(frozen=True, slots=True)
class _Steps:
    """Of the run."""

    first: int
    stop: int
    per_epoch: int


def _loop(
    spec: RunSpec, run_dir: RunDir, source: Source, built: JaxTrainer, logger: RunLogger, saving: Saving, together: StopCoordinator,
    steps: _Steps,
) -> dict[str, Any]:
    world, step = built.world, steps.first
    evaluation = Evaluation(source, built)
    clock = Clock(spec.train.batch_size)
    evaluated: dict[str, Any] = {}
    decision = together.decide()
    with (
        train_batches(source, spec, built.places, world, step, steps.stop) as fed,
        RankTimes(logger, clock, _hosts_every_s(spec, world), world.rank, is_sampling=True) as hosts,
    ):
        batches = clock.timed(fed)
        while step < steps.stop and not decision.stop:
            rate = built.step(next(batches), step)
            step += 1
            clock.step()
            is_last = step == steps.stop
            if step % spec.watch.every == 0 or is_last:
                metrics = built.metrics()
                logger.log("step", {"step": step, "epoch": (step - 1) // steps.per_epoch, "loss": metrics["log_loss"],
                                   **metrics, "learning_rate": rate, **clock.window()})
                if _hosts_every_s(spec, world):
                    hosts.tell(step, world.gathered(hosts.mine()), is_last=is_last)
                refuse_trouble(metrics["log_loss"], built.trouble(), source, spec, step, steps.per_epoch)
            elif clock.ticks():
                logger.tick({"step": step, "samples_per_s": clock.whole()["samples_per_s"]})
            if source.num_eval_samples and (is_last or _divides(spec.train.eval_every, step)):
                with clock.paused():
                    result = evaluation.run(together.is_stopping)
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
    return end_run(spec, run_dir, world, logger, saving, clock, decision, evaluated, step=step, num_steps=steps.stop,
                   peak_bytes=lambda: peak_bytes(world))


def _keep_programs_in(run_dir: RunDir, world: World) -> None:
    """A run that goes on need not wait a minute for the same programs to be compiled again."""
    if world.kind != "cpu":
        jax.config.update("jax_compilation_cache_dir", str(run_dir.path / "programs"))


def _shown(world: World) -> SimpleNamespace:
    """Ranks as a person counts them: the devices."""
    return SimpleNamespace(
        is_first=world.is_first, device=SimpleNamespace(type=world.kind), device_name=world.device_name,
        world_size=world.num_devices, device_bytes=0, local_world_size=world.num_devices // world.world_size,
    )


def _hosts_every_s(spec: RunSpec, world: World) -> float:
    """How often each process, which is a host's, tells its times: where there is one, the run's are its own."""
    return spec.watch.system_every_s if world.world_size > 1 else 0.0


def _divides(every: int, step: int) -> bool:
    return bool(every) and step % every == 0
