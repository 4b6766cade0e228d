"""A run from top to bottom: one loop for every library, on a laptop's CPU or many hosts."""

from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from embark.data import SampleSource, open_training_source, resolve_from_data
from embark.data.stream.records import StreamStopped
from embark.errors import Mistake, RunInUse, SpecError
from embark.events import Sink
from embark.events.events import resume_command
from embark.model.batch import num_steps_of, steps_per_epoch
from embark.run.checkpoint_schedule import CheckpointSchedule
from embark.run.checkpointer import CheckpointManager
from embark.run.clock import Clock
from embark.run.early_stopping import EarlyStopping, Prune
from embark.run.evaluation import Evaluation, leak_warning, refuse_trouble
from embark.run.hold_run import Opening
from embark.run.identity import changes_since, identity_of, without_acceptance
from embark.run.logger import RunLogger, log_changes, log_prediction, log_start, open_run_logger, recorded_errors
from embark.run.open_run import finished_before, open_run
from embark.run.preemption_notices import NoticeWatch, detect_cloud, grace_seconds
from embark.run.rank_reports import RankReports, first_trouble
from embark.run.signals import StopSignals, stopped_by
from embark.run.stop import Decision, StopCoordinator, open_budget_guard, spending_summary, why_not_enforced
from embark.run.trainer import Trainer, TrainerBackend, World
from embark.run.warm_start import WarmStart
from embark.spec import RunSpec
from embark.spec.run import KEY, penalty_mistakes
from embark.spec.train import batch_mistakes, with_train_defaults
from embark.store import RunDir

if TYPE_CHECKING:
    from embark.data.stream.source import StreamSource


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Everything a run needs between its start and its end."""

    spec: RunSpec
    world: World
    run_dir: RunDir
    source: SampleSource
    trainer: Trainer
    logger: RunLogger
    checkpoints: CheckpointManager
    stop: StopCoordinator
    early_stopping: EarlyStopping
    first_step: int
    num_steps: int
    steps_per_epoch: int
    stream: "StreamSource | None" = None  # What it follows, where it has no end of its own.

    @property
    def of_steps(self) -> str:
        """How many there are in all, where there is an end."""
        return "" if self.stream and not self.spec.train.num_steps else f" of {self.num_steps}"


def train(
    spec: RunSpec, backend: TrainerBackend, view: Sequence[Sink] = (), *, fresh: bool = False,
    signals: StopSignals | None = None, prune: Prune | None = None,
) -> dict[str, Any]:
    """Train what `spec` says; returns the values of the last evaluation and of the end.

    The same call starts a run, resumes an interrupted one and leaves a finished one alone. `view` is what a person
    watches; `signals`, entered before, has listened since before the library was imported. `prune` stops a run that
    is one of many.
    """
    if signals is None:
        with StopSignals() as entered:
            return train(spec, backend, view, fresh=fresh, signals=entered, prune=prune)
    signals.is_loading = False
    with (
        backend.join(spec.place) as world,
        NoticeWatch(is_polling=spec.place.watch_notices and world.is_host_leader) as notices,
        ExitStack() as at_end,
    ):
        spec = resolve_from_data(spec)
        check_against(spec, world)
        source = open_training_source(spec, allocate=backend.allocator(world))
        spec = with_train_defaults(spec, source.num_train_samples)
        check_against(spec, world)  # again, for a batch size that only the source could say
        stream = at_end.enter_context(closing(cast("StreamSource", source))) if spec.stream.is_on else None
        per_epoch = steps_per_epoch(source.num_train_samples, spec.train.batch_size)
        num_steps = num_steps_of(spec.train, source.num_train_samples)
        identity = identity_of(spec, source, num_steps, world)
        opening = Opening(signals, view, at_end)
        run_dir, finished_step, changes = open_run(spec, world, opening, identity, num_steps, fresh=fresh)
        spec = without_acceptance(spec)
        if finished_step:
            return finished_before(run_dir, finished_step, spec, view if world.is_first else ())
        with open_run_logger(spec, world, run_dir, view) as logger, recorded_errors(logger, backend.explain):
            trainer = backend.build(spec, world, num_steps, source, run_dir)
            with closing(trainer.checkpointer(run_dir)) as checkpointer:
                checkpoint = checkpointer.load_newest(logger.warn)
                warm_start = WarmStart(spec) if spec.train.warm_start else None
                warm_started = None if checkpoint else checkpointer.start(warm_start, logger.warn)
                step = checkpoint.step if checkpoint else 0
                if stream and checkpoint:
                    stream.restore(run_dir.checkpoints, checkpoint)
                grace_s = spec.place.grace_s or grace_seconds(detect_cloud())
                early_stopping = EarlyStopping(spec.train, source, world, checkpoint, prune)
                checkpoints = CheckpointManager(checkpointer, CheckpointSchedule(spec, step, grace_s), logger, step,
                                                lambda: {KEY: identity, **early_stopping.values()})
                if stream:
                    stream.run_uri = run_dir.uri if run_dir.is_remote else str(run_dir.path.resolve())
                    checkpoints.files = stream.checkpoint_files
                    checkpoints.on_commit.append(stream.committed)
                is_endless = stream is not None and not spec.train.num_steps
                log_start(logger, spec, world, run_dir, source, trainer, {
                    "num_steps": 0 if is_endless else num_steps, "first_step": step, "steps_per_epoch": per_epoch})
                if warm_started:
                    logger.log("warm_start", asdict(warm_started))
                if checkpoint:
                    on_record = [change for change in changes if change.step <= step]
                    log_changes(logger, changes_since(checkpoint, identity, on_record))
                log_prediction(logger, spec, world, trainer)
                guard = open_budget_guard(spec, run_dir, checkpoints.longest_s) if world.is_first else None
                if note := why_not_enforced(spec):
                    logger.warn(note)
                return train_steps(TrainingRun(
                    spec=spec, world=world, run_dir=run_dir, source=source, trainer=trainer, logger=logger,
                    checkpoints=checkpoints, first_step=step, num_steps=num_steps,
                    stop=StopCoordinator(signals, notices, world, guard, run_dir.lease), steps_per_epoch=per_epoch,
                    early_stopping=early_stopping, stream=stream,
                ))


def train_steps(run: TrainingRun) -> dict[str, Any]:
    """Step, log, evaluate and save until the last step or until any rank is asked to stop."""
    spec, trainer, logger, step, early_stopping = run.spec, run.trainer, run.logger, run.first_step, run.early_stopping
    clock = Clock(spec.train.batch_size, trainer.input_waits())
    evaluation = Evaluation(run.source, spec.train.batch_size, run.world, spec.model.tasks)
    evaluated: dict[str, Any] = {}
    if step < run.num_steps and early_stopping.has_missed(step) and (
            evaluated := evaluate(run, evaluation, clock, step)):
        run.checkpoints.add_evaluation(step, evaluated)
    decision = run.stop.decide()
    with (
        trainer.feed(run.source, step, run.num_steps) as fed,
        RankReports(spec, run.world, logger, clock, trainer.profiler()) as reports,
        run.stream.reading(run.stop.is_asked, logger.warn) if run.stream else nullcontext(),
    ):
        batches = clock.timed(fed)
        while step < run.num_steps and not decision.stop and not early_stopping.is_over:
            try:
                with reports.profiling():
                    rate = trainer.step(batches, step)
            except StreamStopped:  # while it waited for records
                decision = run.stop.decide()
                break
            step += 1
            if run.stream:
                run.stream.trained(step)
            clock.step()
            reports.stepped()
            is_last = step == run.num_steps
            if step % spec.watch.every == 0 or is_last:
                metrics = trainer.window_metrics()
                logger.log("step", {"step": step, "epoch": (step - 1) // run.steps_per_epoch,
                                    "loss": metrics["log_loss"], **metrics, "learning_rate": rate, **clock.window(),
                                    **({"stream": run.stream.status(step)} if run.stream else {})})
                gathered = reports.gather(trainer.trouble())
                reports.log(step, gathered, is_last=is_last)
                refuse_trouble(metrics["log_loss"], first_trouble(gathered), run.source, spec, step,
                               run.steps_per_epoch)
            elif clock.ticks():
                logger.tick({"step": step, "samples_per_s": clock.totals()["samples_per_s"]})
            if spec.train.eval_every and step % spec.train.eval_every == 0 and not is_last:
                evaluated = evaluate(run, evaluation, clock, step) or evaluated
            with clock.agreeing():
                decision = run.stop.decide(is_save_due=run.checkpoints.is_due(step) or early_stopping.is_best(step))
            if decision.is_save_due and not is_last and not decision.stop:
                with clock.paused():
                    run.checkpoints.begin(step, evaluated, clock.step_s())
                if not spec.store.in_background:
                    run.checkpoints.wait()
            if not is_last:  # the last is waited for, and its failure fails the run
                run.checkpoints.log_done()
            if problem := run.stop.new_problem():
                logger.note(problem)
        evaluated = save_and_evaluate(run, evaluation, clock, decision, evaluated, step)
    return end_run(run, clock, decision, evaluated, step)


def save_and_evaluate(
    run: TrainingRun, evaluation: Evaluation, clock: Clock, decision: Decision, evaluated: dict[str, Any], step: int
) -> dict[str, Any]:
    """Save what is not saved yet, and only then evaluate: whatever happens in the evaluation, the work is kept."""
    if decision.stop == "lease":
        run.run_dir.check_lease()  # on the first rank, which knows the other process
        raise RunInUse(f"{run.run_dir.uri} was taken over by another process", fix="the first rank says by which")
    wants_last = run.spec.store.checkpoint_at_end or decision.is_save_due or bool(decision.stop)
    is_eval_due = not decision.stop and bool(run.source.num_eval_samples)
    with clock.paused():
        run.checkpoints.finish(step, {} if is_eval_due else evaluated, wants_last=wants_last)
    is_evaluated = evaluated.get("step") == step  # as where early stopping ends the run
    if is_eval_due and (last := evaluated if is_evaluated else evaluate(run, evaluation, clock, step)):
        with clock.paused():
            if run.early_stopping.is_best(step):
                run.checkpoints.finish(step, last, wants_last=True)
            run.checkpoints.add_evaluation(step, last)
            if run.world.is_first and (note := leak_warning(run.source, run.spec, last)):
                run.logger.warn(note)
        return last
    return evaluated


def evaluate(run: TrainingRun, evaluation: Evaluation, clock: Clock, step: int) -> dict[str, Any]:
    """The metrics on held-out samples, logged; empty where there are no samples or the run was asked to stop."""
    if not run.source.num_eval_samples:
        return {}
    with clock.paused():
        if result := evaluation.run(run.trainer, step, run.stop.is_stopping):
            result = {"step": step, **result}
            run.logger.log("eval", result)
            run.early_stopping.add(result)
        return result


def end_run(run: TrainingRun, clock: Clock, decision: Decision, evaluated: dict[str, Any], step: int) -> dict[str, Any]:
    """Log the end; raises where the run was stopped before its last step."""
    end = {"outcome": "done", "step": step, "run_dir": run.run_dir.uri, **clock.totals(),
           "step_s": clock.median_step_s(), "peak_bytes": run.trainer.peak_bytes(),
           **(spending_summary(run.run_dir, decision.stop) if run.world.is_first else {})}
    if step < run.num_steps and not run.early_stopping.is_over:
        end |= run.early_stopping.values()
        is_budget = decision.stop == "budget"
        run.logger.log("interrupt", {"step": step, "signal": decision.stop})
        run.logger.log("end", {**end, "outcome": "budget" if is_budget else "interrupted"})
        saved = f"; saved in {run.run_dir.uri}" if step else ""
        by = "the budget" if is_budget else "Ctrl-C" if decision.stop == "SIGINT" else decision.stop
        what = f"stopped by {by} at step {step}{run.of_steps}{saved}"
        again = resume_command({"name": run.spec.name, "run_dir": run.run_dir.uri, "is_fresh": run.run_dir.is_fresh})
        raise stopped_by(decision.stop, what, again, has_checkpoint=step > 0)
    end |= run.early_stopping.end_values(run.run_dir) if run.world.is_first else {}
    if step < run.num_steps:
        run.logger.note(run.early_stopping.reason())
    run.logger.log("end", end)
    return {**evaluated, **end}


def check_against(spec: RunSpec, world: World) -> None:
    """What can be wrong with a spec only once it is known where it runs."""
    mistakes = [*batch_mistakes(spec.train.batch_size, world.num_devices), *penalty_mistakes(spec)]
    if world.device_type == "cpu" and spec.place.device in ("auto", "cuda"):
        on_cpu = spec.model_copy(update={"place": spec.place.model_copy(update={"device": "cpu"})})
        mistakes += on_cpu.mistakes()
    if spec.stream.is_on and world.world_size > 1:
        what = f"this run has {world.world_size} ranks, and one process follows a stream"
        mistakes.append(Mistake("", "stream.source", spec.stream.source, what, "start one rank; it may have a GPU"))
    if mistakes:
        raise SpecError(mistakes)
