"""The run, from top to bottom: one road for TPUs, GPUs and a CPU's virtual devices, on one host or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax

from embark.data import Source, fit_spec, open_source, steps_per_epoch
from embark.spec import RunSpec
from embark.store import RunDir, open_door
from embark.tpu.built import Built
from embark.tpu.checkpoint import Checkpointer
from embark.tpu.evaluation import Evaluation
from embark.tpu.faults import explain, peak_bytes
from embark.tpu.feed import train_batches
from embark.tpu.world import World, check_against, join
from embark.train.clock import Clock
from embark.train.ending import end_run, finished_before, recorded_errors
from embark.train.faults import refuse_trouble
from embark.train.notices import NoticeWatch, detect_cloud, grace_seconds
from embark.train.pace import Pace
from embark.train.purse import open_purse, unwatched
from embark.train.rank_times import RankTimes
from embark.train.run import open_run
from embark.train.saving import Saving
from embark.train.signals import StopSignals
from embark.train.stopping import Together
from embark.train.telling import Foresee, Telling, tell_foresight, tell_start, telling
from embark.watch import Sink


def train(
    spec: RunSpec, view: Sequence[Sink] = (), *, fresh: bool = False, signals: StopSignals | None = None,
    foresee: Foresee | None = None,
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
        spec = fit_spec(spec, open_door=open_door)
        check_against(spec, world)
        source = open_source(spec, open_door=open_door)
        per_epoch = steps_per_epoch(source, spec.train.batch_size)
        num_steps = spec.train.num_steps or spec.train.num_epochs * per_epoch
        opened = open_run(spec, world, fresh=fresh)
        if opened.finished_step >= num_steps:
            return finished_before(opened.run_dir, opened.finished_step, view if world.is_first else ())
        with telling(spec, world, opened.run_dir, view) as told, recorded_errors(told, explain):
            _keep_programs_in(opened.run_dir, world)
            built = Built(spec, world, num_steps, source)
            checkpointer = Checkpointer(spec, opened.run_dir, built)
            try:
                checkpoint = checkpointer.begin_from_newest(told.warn)
                step = checkpoint.step if checkpoint else 0
                tell_start(told, spec, _shown(world), opened.run_dir, source, built, step=step, num_steps=num_steps,
                           per_epoch=per_epoch)
                tell_foresight(told, spec, _shown(world), built, foresee)
                grace_s = spec.place.grace_s or grace_seconds(detect_cloud())
                saving = Saving(checkpointer, Pace(spec, step, grace_s), told, step)
                purse = open_purse(spec, opened.run_dir, saving.longest_s) if world.is_first else None
                together = Together(signals, notices, world, purse)
                if note := unwatched(spec):
                    told.warn(note)
                return _loop(spec, opened.run_dir, source, built, told, saving, together,
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
    spec: RunSpec, run_dir: RunDir, source: Source, built: Built, told: Telling, saving: Saving, together: Together,
    steps: _Steps,
) -> dict[str, Any]:
    world, step = built.world, steps.first
    evaluation = Evaluation(source, built)
    clock = Clock(spec.train.batch_size)
    evaluated: dict[str, Any] = {}
    decision = together.decide()
    with (
        train_batches(source, spec, built.places, world, step, steps.stop) as fed,
        RankTimes(told, clock, _hosts_every_s(spec, world), world.rank, is_sampling=True) as hosts,
    ):
        batches = clock.timed(fed)
        while step < steps.stop and not decision.stop:
            rate = built.step(next(batches), step)
            step += 1
            clock.step()
            is_last = step == steps.stop
            if step % spec.watch.every == 0 or is_last:
                metrics = built.metrics()
                told.tell("step", {"step": step, "epoch": (step - 1) // steps.per_epoch, "loss": metrics["log_loss"],
                                   **metrics, "learning_rate": rate, **clock.window()})
                if _hosts_every_s(spec, world):
                    hosts.tell(step, world.gathered(hosts.mine()), is_last=is_last)
                refuse_trouble(metrics["log_loss"], built.trouble(), source, spec, step, steps.per_epoch)
            elif clock.ticks():
                told.tick({"step": step, "samples_per_s": clock.whole()["samples_per_s"]})
            if source.num_eval_samples and (is_last or _divides(spec.train.eval_every, step)):
                with clock.paused():
                    result = evaluation.run(together.is_stopping)
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
    return end_run(spec, run_dir, world, told, saving, clock, decision, evaluated, step=step, num_steps=steps.stop,
                   peak_bytes=lambda: peak_bytes(world))


def _keep_programs_in(run_dir: RunDir, world: World) -> None:
    """A run that goes on need not wait a minute for the same programs to be compiled again."""
    if world.kind != "cpu":
        jax.config.update("jax_compilation_cache_dir", str(run_dir.path / "programs"))


def _shown(world: World) -> SimpleNamespace:
    """Ranks as a person counts them: the devices."""
    return SimpleNamespace(
        is_first=world.is_first, device=SimpleNamespace(type=world.kind), device_name=world.device_name,
        world_size=world.num_devices, local_world_size=world.num_devices // world.world_size,
    )


def _hosts_every_s(spec: RunSpec, world: World) -> float:
    """How often each process, which is a host's, tells its times: where there is one, the run's are its own."""
    return spec.watch.system_every_s if world.world_size > 1 else 0.0


def _divides(every: int, step: int) -> bool:
    return bool(every) and step % every == 0
