"""`embark tune`: which settings give the best held-out metric, within a number of trials, minutes and dollars.

    <store.root>/<name>-tune/   optuna.journal  tune.json  best.toml  lease/  trial-0000/  trial-0001/  …
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embark.catalog.pricing import price_of_run
from embark.errors import Diverged, EmbarkError, Fault, Interrupted, OverBudget, Preempted, RunInUse, UserError
from embark.events import Event, Fanout, Sink, read_events
from embark.events.events import to_jsonable
from embark.events.metrics import metric
from embark.events.sinks.services import require_packages
from embark.events.spending import attempts
from embark.formatting import format_usd
from embark.model.steps import num_steps_of
from embark.run.budget import PRICE, usd_per_hour
from embark.run.open_run import RunOpener, make_run_directory
from embark.run.resolve import resolve_run
from embark.run.signals import StopSignals
from embark.spec import RunSpec, to_toml
from embark.spec.paths import with_absolute_paths
from embark.spec.train import HeldOutMetric, measured_metrics, metric_mistake, with_train_defaults
from embark.store import RunDir, run_uri, write_atomic
from embark.store.checkpoint_store import EARLY_STOPPING
from embark.store.run_dir import TUNE
from embark.trainers import open_backend, wants_jax
from embark.tuning.search_space import default_space, own_values, parse_search, with_values

if TYPE_CHECKING:
    import optuna
    from optuna.storages.journal import JournalFileOpenLock, JournalFileSymlinkLock

    from embark.run.trainer import TrainerBackend

NUM_EVALUATIONS = 8  # Evaluations of a trial, if the spec asks for none before the end.
BEST = "best.toml"
JOURNAL = "optuna.journal"
SUBJECT = "subject"  # Key of the tuned spec and its search space.
NUM_STARTUP_TRIALS = 5  # Complete trials before any trial is pruned.
NUM_KEPT_EVALUATIONS = 2  # The first evaluations of a trial, by which it is not pruned yet.
STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "unfinished"}


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """The limits of a search, and the values it tries. A search that is resumed counts what was spent before."""

    trials: int = 30
    minutes: float | None = None
    metric: HeldOutMetric | None = None
    """None: the AUC; for two towers, Recall@K; for tasks of which none is binary, the log loss."""
    search: Sequence[str] = ()
    """Fields and their values, such as `train.learning_rate=0.001..0.1`; empty: rates, optimizers, batch size and
    regularization."""
    workers: int = 1
    """Processes that share the search, such as the jobs of an array of Slurm. One alone repeats its trials exactly."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One trial, which is a run."""

    number: int
    state: str  # complete, pruned, failed or unfinished.
    value: float | None  # The held-out metric at the end or, with early stopping, of the best checkpoint.
    values: Mapping[str, Any]  # Values of the fields that are searched.
    run_dir: str
    seconds: float
    usd: float | None


@dataclass(frozen=True, slots=True)
class TuneResult:
    """All trials so far."""

    folder: str
    metric: HeldOutMetric
    search: Mapping[str, str]
    trials: tuple[TrialResult, ...]
    num_wanted: int
    stopped_by: str  # trials, minutes, usd; empty while it is under way, perhaps by other workers.
    best: int | None
    best_value: float | None
    own_value: float | None  # The value of the first trial, which has the spec's own settings.
    best_spec: str
    seconds: float
    usd: float | None


def tune(
    spec: RunSpec, request: TuneRequest | None = None, view: Sequence[Sink] = (), *, signals: StopSignals | None = None
) -> TuneResult:
    """Search the settings that train `spec` best; the same call resumes a search that was stopped.

    Each trial is a run in `<store.root>/<name>-tune`, and the best is written there as a spec file. `view` gets the
    events of all trials, and a `trial` event before and after each.
    """
    search = Search(spec, request or TuneRequest(), view)
    with nullcontext(signals) if signals else StopSignals() as entered, ExitStack() as at_end:
        if search.request.workers > 1:
            make_run_directory(search.folder)
        else:
            folder = search.spec.model_copy(update={"name": search.folder.name})
            RunOpener(entered, view, at_end).acquire_run(folder, fresh=False)
        return search.run(entered)


class Search:
    """A search between its start and its end, with Optuna's study in a journal file, so that a killed search resumes
    and no server is needed.

    What a trial tries is a function of the seed, its number and the trials before it, so a search that was killed and
    resumed equals an undisturbed one. The process holds the folder's lease. One of several workers holds only the
    leases of its trials: it begins new ones first, and takes over those of workers that died at the end.
    """

    _study: optuna.Study

    def __init__(self, spec: RunSpec, request: TuneRequest, view: Sequence[Sink]) -> None:
        self.request, self._view, self._given = request, view, with_absolute_paths(spec)
        run_dir = RunDir(run_uri(spec.store.root, f"{spec.name}-tune"))
        if run_dir.is_remote:
            raise UserError(f"store.root = {spec.store.root}: embark tune keeps its trials in a local directory",
                            fix="--set store.root=runs")
        for name, value in (("trials", request.trials), ("minutes", request.minutes), ("workers", request.workers)):
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"--{name} {value} is not a positive number", fix=f"leave --{name} out, or give one")
        self.folder = run_dir.path
        self._metric = request.metric or measured_metrics(spec.model)[0]
        if (mistake := metric_mistake(spec.model, "--metric", self._metric)) is not None:
            raise UserError(f"--metric {self._metric} {mistake.what}", fix=mistake.fix)
        run = resolve_run(spec)
        spec, source = run.spec, run.source
        if not source.num_eval_samples:
            raise UserError("embark tune compares trials on held-out samples, and the data has none",
                            fix="hold some out: data.eval_fraction, or data.num_eval_samples")
        self._given = with_train_defaults(self._given, source.num_train_samples)
        self.spec, self._num_train_samples = spec, source.num_train_samples
        self._space = parse_search(spec, request.search) or default_space(
            spec, has_regularization=not wants_jax(spec) and spec.train.engine != "cuda_graph")
        self._search = {field: str(dimension) for field, dimension in self._space.items()}
        duration = {f"train.{name}": getattr(spec.train, name) for name in ("num_epochs", "num_steps", "eval_every")}
        self._subject = {**run.identity, **duration, "--metric": self._metric, "--search": self._search}
        self._usd_per_hour = _price(spec)
        self._finished: dict[int, TrialResult] = {}
        self._elsewhere: set[int] = set()  # Trials that other workers are training.

    def run(self, signals: StopSignals) -> TuneResult:
        """Run trials until the number, the minutes or the dollars are reached."""
        self._open_study()
        backend: TrainerBackend | None = None
        while not (spent := [name for name, left in self._left(self._save()).items() if left <= 0]):
            backend = backend or open_backend(self.spec)
            with self._next_trial() as (trial, values):
                if trial is None:  # the last ones are with other workers
                    return self._save("trials")
                self._emit(self._save(), trial.number)
                try:
                    self._train(trial, self.trial_spec(trial.number, values), backend, signals)
                except RunInUse:
                    if self.request.workers == 1:
                        raise
                    self._elsewhere.add(trial.number)
                    continue
                except OverBudget:
                    left = self._left(self._save()) | {"trials": math.inf}
                    return self._save(min(left, key=left.__getitem__))
            self._emit(self._save(), trial.number)
        return self._save(spent[0])

    def _open_study(self) -> None:
        """Begin with the spec's own values, or resume a study of the same subject; another one is refused."""
        require_packages("embark tune needs the optuna package, which is not installed", "tune", "optuna")
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = self.folder / JOURNAL
        subject = json.loads(json.dumps(self._subject))
        try:
            _check_files(journal)
            if self.request.workers == 1:  # the lease excludes a live one
                Path(f"{journal}.lock").unlink(missing_ok=True)
            journal.touch()
            with _held(JournalFileSymlinkLock(str(journal))):
                _cut_partial_line(journal)
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))), study_name="tune",
                load_if_exists=True, direction="maximize" if metric(self._metric).better == "up" else "minimize",
                pruner=optuna.pruners.MedianPruner(n_startup_trials=NUM_STARTUP_TRIALS,
                                                   n_warmup_steps=NUM_KEPT_EVALUATIONS + 1))
            before = dict(self._study.user_attrs.get(SUBJECT, subject))
        except (OSError, ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError,
                ValueError) as error:  # Optuna replays the journal, and checks none of its values
            raise _damaged(journal, f"{error!r:.200}") from None
        changed = sorted(name for name in {*before, *subject} if before.get(name) != subject.get(name))
        if changed:
            raise UserError(f"{self.folder} has the trials of another search: {', '.join(changed)} changed",
                            fix="--set name=… starts a new search")
        for one in self._trials():
            self._check_values(one.number, one.params)
        with self._alone():
            self._study.set_user_attr(SUBJECT, subject)
            if not self._study.get_trials(deepcopy=False):
                own = own_values(self.spec, self._space)
                self._study.enqueue_trial({field: own[field] for field, of in self._space.items()
                                           if of.contains(own[field])})

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return the trials that were started."""
        return [one for one in self._study.get_trials() if one.state.name != "WAITING"]

    @contextmanager
    def _next_trial(self) -> Iterator[tuple[optuna.Trial | None, dict[str, Any]]]:
        """Give the trial that was interrupted, or a new one, with its values; None if other workers have the rest."""
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of samplers that are new, and of evaluations reported twice
            with self._alone():
                begun = self._trials()
                left = [one for one in begun if not one.state.is_finished() and one.number not in self._elsewhere]
                can_begin = len(begun) < self.request.trials
                if can_begin and (not left or self.request.workers > 1):
                    found: optuna.Trial | optuna.trial.FrozenTrial | None = self._study.ask()
                else:
                    found = left[0] if left else None
            if found is None:
                yield None, {}
                return
            self._study.sampler = optuna.samplers.TPESampler(
                seed=self.spec.train.seed + found.number, multivariate=True, constant_liar=self.request.workers > 1)
            trial = optuna.Trial(self._study, found._trial_id)
            values = {field: dimension.suggest(trial, field) for field, dimension in self._space.items()}
            self._check_values(trial.number, values)
            yield trial, values

    def _check_values(self, number: int, values: Mapping[str, Any]) -> None:
        """Refuse values that a search over this space cannot have given to a trial."""
        for field, value in values.items():
            if field not in self._space or not self._space[field].contains(value):
                raise _damaged(self.folder / JOURNAL, f"{field} of trial {number} is {value!r:.100}")

    def _why_pruned(self, trial: optuna.Trial) -> str:
        """Return why a trial is not worth its remaining steps; empty if it is."""
        return f"pruned: held-out {metric(self._metric).label} is worse than the median of the trials before" \
            if trial.should_prune() else ""

    def tell(self, trial: optuna.Trial, state: str, value: float | None = None) -> None:
        """Record how a trial ended: `COMPLETE`, `PRUNED` or `FAIL`. Another worker may have found it at its end too."""
        import optuna

        with self._alone():
            self._study.tell(trial, value, state=optuna.trial.TrialState[state], skip_if_finished=True)

    def _train(self, trial: optuna.Trial, spec: RunSpec, backend: TrainerBackend, signals: StopSignals) -> None:
        from embark.run.loop import train

        def report(evaluated: Mapping[str, Any]) -> str:
            trial.report(evaluated[self._metric], math.ceil(evaluated["step"] / spec.train.eval_every))
            return self._why_pruned(trial)

        if self._why_pruned(trial):  # it was, and the process was killed before it could say so
            return self.tell(trial, "PRUNED")
        # At the deadline the run stops as if its budget were spent, and saves.
        left = self._left(self._result()) | {"trials": math.inf}
        signals.deadline_s = time.monotonic() + min(left.values()) / self.request.workers
        try:
            ended = train(spec, backend, [_OpenFanout(self._view)], signals=signals, prune=report)
        except (Interrupted, Preempted, OverBudget, RunInUse, Fault):
            raise  # the same trial resumes
        except EmbarkError as error:
            self.tell(trial, "FAIL")
            if not isinstance(error, Diverged):
                raise
            return None
        finally:
            signals.deadline_s = math.inf
        if ended["step"] < num_steps_of(spec.train, self._num_train_samples) and self._why_pruned(trial):
            return self.tell(trial, "PRUNED")
        early = ended.get(EARLY_STOPPING) or {}  # of the best checkpoint, which is the one to use
        best = early.get("best") if early.get("metric") == self._metric else None
        value = float(ended[self._metric] if best is None else best)
        return self.tell(trial, "COMPLETE", value) if math.isfinite(value) else self.tell(trial, "FAIL")

    def trial_spec(self, number: int, values: Mapping[str, Any]) -> RunSpec:
        """Return the spec of a trial, which is evaluated at the same shares of its steps as every other."""
        spec = with_values(self.spec, {  # the budget is that of all trials together
            **values, "name": trial_name(number), "store.root": str(self.folder), "place.budget_usd": None})
        if spec.train.eval_every:
            return spec
        num_steps = num_steps_of(spec.train, self._num_train_samples)
        return with_values(spec, {"train.eval_every": max(1, math.ceil(num_steps / NUM_EVALUATIONS))})

    def _left(self, result: TuneResult) -> dict[str, float]:
        """Return how many trials are left, and how many seconds until the minutes and the dollars are spent."""
        left = {"trials": float(self.request.trials - sum(one.state != "unfinished" for one in result.trials))}
        if self.request.minutes is not None:
            left["minutes"] = self.request.minutes * 60 - result.seconds
        if self.spec.place.budget_usd is not None and self._usd_per_hour:
            left["usd"] = self.spec.place.budget_usd / self._usd_per_hour * 3600 - result.seconds
        return left

    def _save(self, stopped_by: str = "") -> TuneResult:
        """Write the results, for `embark watch` and for a person, and remove checkpoints that nobody needs."""
        with self._alone():
            result = self._result(stopped_by)
            if result.best is not None:
                best = with_values(self._given, {**result.trials[result.best].values,
                                                 "name": f"{self.spec.name}-tuned"})
                write_atomic(self.folder / BEST, to_toml(best, only_set=True))
            write_atomic(self.folder / TUNE, json.dumps(to_jsonable(asdict(result)), indent=1, allow_nan=False) + "\n")
        for one in result.trials:
            if one.number != result.best and one.state != "unfinished":
                for folder in ("checkpoints", "data"):
                    shutil.rmtree(Path(one.run_dir, folder), ignore_errors=True)
        return result

    def _result(self, stopped_by: str = "") -> TuneResult:
        trials = tuple(self._trial_result(one) for one in self._trials())
        sign = 1 if metric(self._metric).better == "up" else -1
        complete = {one.number: sign * (one.value or 0.0) for one in trials if one.state == "complete"}
        best = max(complete, key=complete.__getitem__, default=None)
        seconds = sum(one.seconds for one in trials)
        if stopped_by == "trials" and any(one.state == "unfinished" for one in trials):
            stopped_by = ""
        return TuneResult(
            folder=str(self.folder), metric=self._metric, search=self._search, trials=trials,
            num_wanted=self.request.trials, stopped_by=stopped_by, best=best,
            best_value=None if best is None else trials[best].value,
            own_value=trials[0].value if trials else None,
            best_spec="" if best is None else str(self.folder / BEST), seconds=seconds,
            usd=self._usd(seconds),
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude the other workers."""
        from optuna.storages.journal import JournalFileOpenLock

        with nullcontext() if self.request.workers == 1 else _held(JournalFileOpenLock(str(self.folder / "workers"))):
            yield

    def _usd(self, seconds: float) -> float | None:
        return None if self._usd_per_hour is None else seconds / 3600 * self._usd_per_hour

    def _trial_result(self, frozen: optuna.trial.FrozenTrial) -> TrialResult:
        if frozen.number in self._finished:
            return self._finished[frozen.number]
        run_dir = RunDir(str(self.folder / trial_name(frozen.number)))
        events = list(read_events(run_dir.events)) if run_dir.events.is_file() else []
        seconds = sum(one.held_s for one in attempts(events))
        result = TrialResult(
            number=frozen.number, state=STATES[frozen.state.name], values=dict(frozen.params), run_dir=run_dir.uri,
            value=frozen.value if frozen.state.name == "COMPLETE" else None,
            seconds=seconds, usd=self._usd(seconds))
        if result.state != "unfinished":
            self._finished[frozen.number] = result
        return result

    def _emit(self, result: TuneResult, number: int) -> None:
        Fanout(self._view).emit(Event("trial", {
            **asdict(result.trials[number]), "best": result.best, "best_value": result.best_value,
            "num_wanted": result.num_wanted}))


class _OpenFanout(Fanout):
    """Sinks that outlive a trial."""

    def close(self) -> None:
        """Leave the sinks open: the next trial goes to the same."""


def trial_name(number: int) -> str:
    return f"trial-{number:04d}"


def _price(spec: RunSpec) -> float | None:
    """Return the price of this machine, by the rule of `embark plan` and `embark report`."""
    price, given, budget_usd = price_of_run(spec, {}), usd_per_hour(), spec.place.budget_usd
    per_hour = price.usd_per_hour if given is None else given
    if budget_usd is not None and per_hour is None:
        raise UserError(f"a budget of {format_usd(budget_usd)} cannot be enforced. {price.text}",
                        fix=f"set {PRICE} to its dollars per hour, or limit the search by --minutes")
    return per_hour


def _damaged(journal: Path, why: str) -> UserError:
    return UserError(f"{journal}: is damaged: {why}",
                     fix="remove it: the trials are run again; or --set name=… starts a new search")


@contextmanager
def _held(lock: JournalFileOpenLock | JournalFileSymlinkLock) -> Iterator[None]:
    """Hold one of Optuna's locks, which need nothing of the file system, and which it takes from a process that has
    held one for 30 s."""
    lock.acquire()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # this process has held it for so long
            lock.release()


def _check_files(journal: Path) -> None:
    for path in (journal, journal.with_name(TUNE)):
        if path.is_symlink() or path.is_dir():
            raise ValueError(f"{path.name} is a link or a directory")


def _cut_partial_line(journal: Path) -> None:
    """Cut off a line that a killed process did not finish, which Optuna would refuse."""
    size = journal.read_bytes().rfind(b"\n") + 1
    if size != journal.stat().st_size:
        os.truncate(journal, size)
