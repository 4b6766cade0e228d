"""A run from top to bottom: one loop for every library, on a laptop's CPU or many hosts."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field

from embark.errors import RunInUse
from embark.events import Sink
from embark.events.events import resume_command
from embark.spec import RunSpec
from embark.spec.run import KEY
from embark.store import RunDir
from embark.values import JsonDict
from .budget import open_budget_guard, spending_summary, why_not_enforced
from .checkpointer import CheckpointManager, CheckpointSchedule
from .clock import Clock
from .early_stopping import EarlyStopping, Prune
from .evaluation import Evaluation, influence_warning, leak_warning, refuse_trouble
from .identity import changes_since
from .logger import RunLogger, log_changes, log_prediction, log_start, open_run_logger, recorded_errors
from .open_run import RunOpener, open_run, replay_finished
from .preemption_notices import NoticeWatch, detect_cloud, grace_seconds
from .rank_reports import RankReports, first_trouble
from .resolve import ResolvedRun, resolve_run
from .signals import StopSignals, stopped_by
from .stop import Decision, StopCoordinator
from .trainer import Trainer, TrainerBackend, World
from .training_data import DataStopped
from .warm_start import WarmStart


def train(
    spec: RunSpec, backend: TrainerBackend, view: Sequence[Sink] = (), *, fresh: bool = False,
    signals: StopSignals | None = None, prune: Prune | None = None, opener: RunOpener | None = None
) -> JsonDict:
    """Train what `spec` says; returns the values of the last evaluation and of the end.

    The same call starts a run, resumes an interrupted one and leaves a finished one alone. `view` is what a person
    watches. `signals`, already entered, has listened since before the library was imported; so has `opener`, which may
    have begun the run. `prune` may stop a run that is one of many.
    """
    if opener is None:
        with ExitStack() as at_end:
            opener = RunOpener(signals or at_end.enter_context(StopSignals()), view, at_end)
            return train(spec, backend, view, fresh=fresh, prune=prune, opener=opener)
    signals = opener.signals
    signals.is_loading = False
    with (
        backend.join(spec.place) as world,
        NoticeWatch(is_polling=spec.place.watch_notices and world.is_host_leader) as notices,
        ExitStack() as at_end
    ):
        run = resolve_run(spec, world, allocate=backend.allocator(world))
        spec, data = run.spec, at_end.enter_context(closing(run.data))
        run_dir, finished_step, changes = open_run(run, world, opener, fresh=fresh)
        if finished_step:
            return replay_finished(run_dir, finished_step, spec, view if world.is_first else ())
        logger = at_end.enter_context(open_run_logger(spec, world, run_dir, view))
        at_end.enter_context(recorded_errors(logger, backend.explain))
        trainer = backend.build(spec, world, run.num_steps, run.source, run_dir)
        checkpointer = at_end.enter_context(closing(trainer.checkpointer(run_dir)))
        checkpoint = checkpointer.load_newest(logger.warn)
        warm_start = WarmStart(spec) if spec.train.warm_start else None
        warm_started = None if checkpoint else checkpointer.start(warm_start, logger.warn)
        step = checkpoint.step if checkpoint else 0
        data.resume(run_dir, checkpoint)
        early_stopping = EarlyStopping(spec.train, run.source, world, checkpoint, prune)
        schedule = CheckpointSchedule(spec, step, spec.place.grace_s or grace_seconds(detect_cloud()))
        checkpoints = CheckpointManager(checkpointer, schedule, logger, step, data,
                                        lambda: {KEY: run.identity, **early_stopping.values()})
        log_start(logger, run, world, run_dir, trainer, step)
        if warm_started:
            logger.log("warm_start", asdict(warm_started))
        if checkpoint:
            on_record = [change for change in changes if change.step <= step]
            log_changes(logger, changes_since(checkpoint, run.identity, on_record))
        log_prediction(logger, spec, world, trainer)
        guard = open_budget_guard(spec, run_dir, checkpoints.longest_s) if world.is_first else None
        if note := why_not_enforced(spec):
            logger.warn(note)
        return TrainingLoop(
            run=run, world=world, run_dir=run_dir, trainer=trainer, logger=logger, checkpoints=checkpoints,
            stop=StopCoordinator(signals, notices, world, guard, run_dir.lease), early_stopping=early_stopping,
            step=step
        ).train()


@dataclass(slots=True)
class TrainingLoop:
    """A run between its start and its end."""

    run: ResolvedRun
    world: World
    run_dir: RunDir
    trainer: Trainer
    logger: RunLogger
    checkpoints: CheckpointManager
    stop: StopCoordinator
    early_stopping: EarlyStopping
    step: int  # Steps that are done.
    clock: Clock = field(init=False)
    evaluation: Evaluation = field(init=False)
    evaluated: JsonDict = field(default_factory=dict)  # Values of the last evaluation.
    decision: Decision = field(default_factory=Decision)

    def __post_init__(self) -> None:
        spec = self.run.spec
        self.clock = Clock(spec.train.batch_size, self.trainer.input_waits())
        self.evaluation = Evaluation(self.run.source, spec.train.batch_size, self.world, spec.model.tasks)

    def train(self) -> JsonDict:
        """Step, log, evaluate and save until the last step or until any rank is asked to stop."""
        run, clock, checkpoints = self.run, self.clock, self.checkpoints
        data, train = run.data, run.spec.train
        if self.step < run.num_steps and self.early_stopping.has_missed(self.step) and self.evaluate():
            checkpoints.add_evaluation(self.step, self.evaluated)
        self.decision = self.stop.decide()
        with (
            self.trainer.feed(run.source, self.step, run.num_steps) as fed,
            RankReports(run.spec, self.world, self.logger, clock, self.trainer.profiler()) as reports,
            data.reading(self.stop.is_asked, self.logger.warn)
        ):
            batches = clock.timed(fed)
            while self.step < run.num_steps and not self.decision.stop and not self.early_stopping.is_over:
                try:
                    with reports.profiling():
                        rate = self.trainer.step(batches, self.step)
                except DataStopped:  # the run was asked to stop while it waited for data
                    self.decision = self.stop.decide()
                    break
                self.step += 1
                data.trained(self.step)
                clock.step()
                reports.stepped()
                is_last = self.step == run.num_steps
                self.log_step(reports, rate, is_last=is_last)
                if train.eval_every and self.step % train.eval_every == 0 and not is_last:
                    self.evaluate()
                with clock.agreeing():
                    is_save_due = checkpoints.is_due(self.step) or self.early_stopping.is_best(self.step)
                    self.decision = self.stop.decide(is_save_due=is_save_due)
                if self.decision.is_save_due and not is_last and not self.decision.stop:
                    with clock.paused():
                        checkpoints.begin(self.step, self.evaluated, clock.step_s())
                    if not run.spec.store.in_background:
                        checkpoints.wait()
                if not is_last:  # the last is waited for, and its failure fails the run
                    checkpoints.log_done()
                if problem := self.stop.new_problem():
                    self.logger.note(problem)
            self.save_and_evaluate()
        return self.end()

    def log_step(self, reports: RankReports, rate: float, *, is_last: bool) -> None:
        """Log the metrics of the window that ends here, and raise if training went wrong in it."""
        run, step = self.run, self.step
        if step % run.spec.watch.every and not is_last:
            if self.clock.ticks():
                self.logger.tick({"step": step, "samples_per_s": self.clock.totals()["samples_per_s"]})
            return
        metrics = self.trainer.window_metrics()
        self.logger.log("step", {"step": step, "epoch": (step - 1) // run.steps_per_epoch, "loss": metrics["log_loss"],
                                 **metrics, "learning_rate": rate, **self.clock.window(), **run.data.status(step)})
        gathered = reports.gather(self.trainer.trouble())
        reports.log(step, gathered, is_last=is_last)
        refuse_trouble(metrics["log_loss"], first_trouble(gathered), run.source, run.spec, step, run.steps_per_epoch)

    def evaluate(self) -> bool:
        """Measure and log the metrics on held-out samples; False if there are none or the run was asked to stop."""
        if not self.run.source.num_eval_samples:
            return False
        with self.clock.paused():
            result = self.evaluation.run(self.trainer, self.step, self.stop.is_stopping)
            if result:
                self.evaluated = {"step": self.step, **result}
                self.logger.log("eval", self.evaluated)
                self.early_stopping.add(self.evaluated)
        return bool(result)

    def save_and_evaluate(self) -> None:
        """Save what is not saved yet, and only then evaluate: whatever happens in the evaluation, the work is kept."""
        run, step, stop = self.run, self.step, self.decision.stop
        if stop == "lease":
            self.run_dir.check_lease()  # on the first rank, which knows the other process
            raise RunInUse(f"{self.run_dir.uri} was taken over by another process", "the first rank says by which")
        wants_last = run.spec.store.checkpoint_at_end or self.decision.is_save_due or bool(stop)
        is_eval_due = not stop and bool(run.source.num_eval_samples)
        with self.clock.paused():
            self.checkpoints.finish(step, {} if is_eval_due else self.evaluated, wants_last=wants_last)
        is_evaluated = self.evaluated.get("step") == step  # as when early stopping ends the run
        if not is_eval_due or not (is_evaluated or self.evaluate()):
            return
        with self.clock.paused():
            if self.early_stopping.is_best(step):
                self.checkpoints.finish(step, self.evaluated, wants_last=True)
            self.checkpoints.add_evaluation(step, self.evaluated)
            if self.world.is_first and (note := leak_warning(run.source, run.spec, self.evaluated)):
                self.logger.warn(note)
            if "auc" in self.evaluated:
                note = influence_warning(self.trainer, run.source, run.spec, self.world, step)
                if note and self.world.is_first:
                    self.logger.warn(note)

    def end(self) -> JsonDict:
        """Log the end; raises if the run was stopped before its last step."""
        run, run_dir, step, stop = self.run, self.run_dir, self.step, self.decision.stop
        end = {"outcome": "done", "step": step, "run_dir": run_dir.uri, **self.clock.totals(),
               "step_s": self.clock.median_step_s(), "peak_bytes": self.trainer.peak_bytes(),
               **(spending_summary(run_dir, stop) if self.world.is_first else {})}
        if step < run.num_steps and not self.early_stopping.is_over:
            end |= self.early_stopping.values()
            is_budget = stop == "budget"
            self.logger.log("interrupt", {"step": step, "signal": stop})
            self.logger.log("end", {**end, "outcome": "budget" if is_budget else "interrupted"})
            saved = f"; saved in {run_dir.uri}" if step else ""
            by = {"budget": "the budget", "SIGINT": "Ctrl-C"}.get(stop, stop)
            total = "" if run.data.is_endless else f" of {run.num_steps}"
            again = resume_command({"name": run.spec.name, "run_dir": run_dir.uri, "is_fresh": run_dir.is_fresh})
            raise stopped_by(stop, f"stopped by {by} at step {step}{total}{saved}", again, has_checkpoint=step > 0)
        end |= self.early_stopping.end_values(run_dir) if self.world.is_first else {}
        if step < run.num_steps:
            self.logger.note(self.early_stopping.reason())
        self.logger.log("end", end)
        return {**self.evaluated, **end}
