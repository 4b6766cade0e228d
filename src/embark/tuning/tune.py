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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embark.catalog.pricing import price_of_run
from embark.data.prepare.inputs import open_inputs
from embark.data.prepare.prepare import prepare_from_spec
from embark.errors import Diverged, EmbarkError, OverBudget, RunInUse, SpecError, UserError
from embark.events import Event, Fanout, Sink, read_events
from embark.events.events import to_jsonable
from embark.events.metrics import metric
from embark.events.results import Tabular
from embark.events.sinks.services import require_packages
from embark.events.spending import attempts
from embark.formatting import format_usd
from embark.model.steps import num_steps_of
from embark.run.budget import PRICE, usd_per_hour
from embark.run.open_run import RunOpener, make_run_directory
from embark.run.resolve import resolve_run
from embark.run.signals import StopSignals
from embark.spec import RunSpec, to_toml, with_absolute_paths
from embark.spec.train import EVALS_PER_EPOCH, SUITED, HeldOutMetric, measured_metrics, metric_mistake
from embark.store import RunDir, run_uri, write_atomic
from embark.store.checkpoint_store import EARLY_STOPPING
from embark.store.run_dir import TUNE
from embark.trainers import open_backend, wants_jax
from embark.values import JsonDict, JsonMap, frozen
from .search_space import default_space, own_values, parse_search, with_values

if TYPE_CHECKING:
    import optuna

    from embark.run.trainer import TrainerBackend

MAX_INPUT_BYTES = 256 << 20  # Of raw files that are prepared again for other features, unless --search names them.
NUM_EVALUATIONS = 8  # Evaluations of a trial, if the spec asks for none before the end.
BEST = "best.toml"
JOURNAL = "optuna.journal"
SUBJECT = "subject"  # Key of the tuned spec and its search space.
NUM_STARTUP_TRIALS = 5  # Complete trials before any trial is pruned.
FIRST_EVALUATION = 3  # The first evaluation of a trial by which it may be pruned.
STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "unfinished"}


@frozen
class TuneRequest:
    """The limits of a search, and the values it tries. A search that is resumed counts what was spent before."""

    trials: int = 30
    minutes: float | None = None
    metric: HeldOutMetric | None = None
    """None: the AUC; for two towers, Recall@K; for tasks of which none is binary, the log loss."""
    search: Sequence[str] = ()
    """Fields and their values, such as `train.learning_rate=0.001..0.1`; empty: rates, optimizers, batch size,
    regularization, the model's kind, width and layers, epochs and features."""
    workers: int = 1
    """Processes that share the search, such as the jobs of an array of Slurm. One alone repeats its trials exactly."""


@frozen
class TrialResult:
    """One trial, which is a run."""

    number: int
    state: str  # complete, pruned, failed or unfinished.
    value: float | None  # The held-out metric at the end or, with early stopping, of the best checkpoint.
    values: JsonMap  # Values of the fields that are searched.
    run_dir: str
    seconds: float
    usd: float | None


@frozen
class TuneResult(Tabular):
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

    def to_rows(self) -> list[JsonDict]:
        """Return a row for each trial, with a column for each field that is searched."""
        return [{"number": one.number, "state": one.state, "value": one.value, **one.values, "seconds": one.seconds,
                 "usd": one.usd, "run_dir": one.run_dir} for one in self.trials]


def tune(
    spec: RunSpec, request: TuneRequest | None = None, view: Sequence[Sink] = (), *, signals: StopSignals | None = None
) -> TuneResult:
    """Search the settings that train `spec` best; the same call resumes a search that was stopped.

    Each trial is a run in `<store.root>/<name>-tune`, and the best is written there as a spec file. `view` gets the
    events of all trials, and a `trial` event before and after each.
    """
    search = Search(spec, request or TuneRequest(), view)
    with nullcontext(signals) if signals else StopSignals() as entered, ExitStack() as at_end, \
            warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samplers that are new, and of evaluations reported twice
        if search.request.workers > 1:
            make_run_directory(search.folder)
        else:
            RunOpener(entered, view, at_end).acquire_run(
                search.spec.changed(name=search.folder.name), fresh=False)
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
        self.request, self._view = request, _OpenFanout(view)
        run_dir = RunDir(run_uri(spec.store.root, f"{spec.name}-tune"))
        if run_dir.is_remote:
            raise UserError(f"store.root = {spec.store.root}: embark tune keeps its trials in a local directory",
                            "--set store.root=runs")
        for name in ("trials", "minutes", "workers"):
            value = getattr(request, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"--{name} {value} is not a positive number", f"leave --{name} out, or give one")
        self.folder = run_dir.path
        self._metric = request.metric or measured_metrics(spec.model)[0]
        if (mistake := metric_mistake(spec.model, "--metric", self._metric)):
            raise UserError(f"--metric {self._metric} {mistake.what}", mistake.fix)
        run = resolve_run(spec)
        self._has_own_pace = run.spec.train.eval_every > 0 and not spec.train.eval_every
        if not run.source.num_eval_samples:
            raise UserError("embark tune compares trials on held-out samples, and the data has none",
                            "hold some out: data.eval_fraction, or data.num_eval_samples")
        self._num_train_samples = run.source.num_train_samples
        given, model = with_absolute_paths(spec), run.spec.model
        names = {*SUITED, "tables"} if given.model.tables else SUITED
        suited = {name: getattr(model, name) for name in names & model.model_fields_set}
        self._given = given.changed(model=given.model.changed(**suited), train=run.spec.train)
        self.spec = spec = run.spec
        self._space = parse_search(spec, request.search) or default_space(
            spec, has_regularization=not wants_jax(spec) and spec.train.engine != "cuda_graph",
            has_own_pace=self._has_own_pace, has_features=self._has_features(MAX_INPUT_BYTES))
        self._searches_features = any(field.startswith("features.") for field in self._space)
        if self._searches_features and not self._has_features():
            raise UserError("--search features…: the data cannot be prepared again with other features",
                            "leave tables and num_dense out of [model], name data.prepare.input, and search with "
                                "one worker")
        self._search = {field: str(dimension) for field, dimension in self._space.items()}
        duration = {f"train.{name}": getattr(spec.train, name) for name in ("num_epochs", "num_steps", "eval_every")}
        self._subject = {**run.identity, **duration, "--metric": self._metric, "--search": self._search}
        self._usd_per_s = _usd_per_s(spec)
        limits = [(60 * (request.minutes or math.inf), "minutes")]
        if spec.place.budget_usd is not None and self._usd_per_s:
            limits.append((spec.place.budget_usd / self._usd_per_s, "usd"))
        self._limit_s, self._limit = min(limits)  # The one that is reached first.
        self._finished: dict[int, TrialResult] = {}
        self._elsewhere: set[int] = set()  # Trials that other workers are training.

    def run(self, signals: StopSignals) -> TuneResult:
        """Run trials until the number, the minutes or the dollars are reached."""
        self._open_study()
        backend: TrainerBackend | None = None
        while not (result := self._save()).stopped_by:
            backend = backend or open_backend(self.spec)
            trial = self._next_trial()
            if trial is None:  # the last ones are with other workers
                break
            self._emit(trial.number)
            try:
                self._train(trial, backend, signals)
            except RunInUse:
                if self.request.workers == 1:
                    raise
                self._elsewhere.add(trial.number)
                continue
            except OverBudget:
                return self._save(self._limit)
            self._emit(trial.number)
        return result

    def _open_study(self) -> None:
        """Begin with the spec's own values, or resume a study of the same subject; another one is refused."""
        require_packages("embark tune needs the optuna package, which is not installed", "tune", "optuna")
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = self.folder / JOURNAL
        subject = json.loads(json.dumps(self._subject))
        try:
            if journal.is_symlink() or (self.folder / TUNE).is_dir():
                raise ValueError(f"it is a link, or {TUNE} is a folder")
            if self.request.workers == 1:  # the lease excludes a live one
                Path(f"{journal}.lock").unlink(missing_ok=True)
            journal.touch()
            with _held(JournalFileSymlinkLock(str(journal))):  # a killed process may have left a part of a line
                os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))), study_name="tune",
                load_if_exists=True, direction="maximize" if metric(self._metric).better == "up" else "minimize",
                pruner=optuna.pruners.MedianPruner(n_startup_trials=NUM_STARTUP_TRIALS,
                                                   n_warmup_steps=FIRST_EVALUATION))
            before = dict(self._study.user_attrs.get(SUBJECT, subject))
        except Exception as error:  # Optuna replays the journal, and checks none of its values
            raise self._damage(f"{error!r:.200}") from None
        changed = sorted(name for name in {*before, *subject} if before.get(name) != subject.get(name))
        if changed:
            raise UserError(f"{self.folder} has the trials of another search: {', '.join(changed)} changed",
                            "--set name=… starts a new search")
        with self._alone():
            self._study.set_user_attr(SUBJECT, subject)
            if not self._study.get_trials():
                self._study.enqueue_trial({field: value for field, value in own_values(self.spec, self._space).items()
                                           if self._space[field].contains(value)})

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return the trials that were started."""
        return [one for one in self._study.get_trials() if one.state.name != "WAITING"]

    def _next_trial(self) -> optuna.Trial | None:
        """Return the trial that was interrupted, or a new one; None if other workers have the rest."""
        import optuna

        with self._alone():
            begun = self._trials()
            waiting: list[Any] = [one for one in begun
                                  if not one.state.is_finished() and one.number not in self._elsewhere]
            if len(begun) < self.request.trials and (not waiting or self.request.workers > 1):
                waiting = [self._study.ask()]
        if not waiting:
            return None
        self._study.sampler = optuna.samplers.TPESampler(
            seed=self.spec.train.seed + waiting[0].number, multivariate=True, constant_liar=self.request.workers > 1)
        trial = optuna.Trial(self._study, waiting[0]._trial_id)
        for field, dimension in self._space.items():
            dimension.suggest(trial, field)
        return trial

    def tell(self, trial: optuna.Trial, state: str, value: float | None = None) -> None:
        """Record how a trial ended: `COMPLETE`, `PRUNED` or `FAIL`. Another worker may have found it at its end too."""
        import optuna

        with self._alone():
            self._study.tell(trial, value, state=optuna.trial.TrialState[state], skip_if_finished=True)

    def _train(self, trial: optuna.Trial, backend: TrainerBackend, signals: StopSignals) -> None:
        from embark.run.loop import train

        try:
            spec = self._trial_spec(trial)
        except SpecError:  # each value is allowed by itself
            return self.tell(trial, "FAIL")

        def report(evaluated: JsonMap) -> str:
            trial.report(evaluated[self._metric], math.ceil(evaluated["step"] / spec.train.eval_every))
            return f"pruned: held-out {metric(self._metric).label} is worse than the median of the trials before" \
                if trial.should_prune() else ""

        if trial.should_prune():  # it was, and the process was killed before it could say so
            return self.tell(trial, "PRUNED")
        # At the deadline the run stops as if its budget were spent, and saves.
        signals.deadline_s = time.monotonic() + (self._limit_s - self._result().seconds) / self.request.workers
        try:
            ended = train(spec, backend, [self._view], signals=signals, prune=report)
        except (OverBudget, RunInUse):
            raise  # the same trial resumes, as after a fault, a preemption or Ctrl-C
        except UserError:
            self.tell(trial, "FAIL")
            raise
        except Diverged:
            return self.tell(trial, "FAIL")
        finally:
            signals.deadline_s = math.inf
        if ended["step"] < num_steps_of(spec.train, self._num_train_samples) and trial.should_prune():
            return self.tell(trial, "PRUNED")
        early = ended.get(EARLY_STOPPING) or {}  # of the best checkpoint, which is the one to use
        best = early.get("best") if early.get("metric") == self._metric else None
        value = float(ended[self._metric] if best is None else best)
        return self.tell(trial, "COMPLETE", value) if math.isfinite(value) else self.tell(trial, "FAIL")

    def _trial_spec(self, trial: optuna.Trial) -> RunSpec:
        """Return the spec of a trial, which is evaluated at the same shares of its steps as every other."""
        values = self._values(trial.params)
        if "data.path" in values:
            prepare_from_spec(with_values(self._given, values))
        spec = with_values(self._given if self._searches_features else self.spec, {
            **values,  # the budget is that of all trials together
            "name": trial_name(trial.number), "store.root": str(self.folder), "place.budget_usd": None})
        num = spec.train.num_epochs * EVALS_PER_EPOCH if self._has_own_pace else NUM_EVALUATIONS
        share = math.ceil(num_steps_of(spec.train, self._num_train_samples) / num)
        return with_values(spec, {"train.eval_every": share if self._has_own_pace else spec.train.eval_every or share})

    def _has_features(self, max_bytes: float = math.inf) -> bool:
        """Tell whether trials may have other features: of files in memory, or of data that is prepared again."""
        spec, model = self._given, self._given.model
        if spec.stream.is_on or spec.data.kind != "prepared":
            return spec.data.kind == "columns" and not spec.stream.is_on
        if model.gives_tables or "num_dense" in model.model_fields_set or self.request.workers > 1:
            return False
        try:
            return sum(file.size_bytes for file in open_inputs(spec.data.prepare.input)[1]) <= max_bytes
        except EmbarkError:
            return False

    def _values(self, params: JsonMap) -> JsonDict:
        """Return the values of a trial, with the place of data that is prepared so."""
        own = own_values(self.spec, params)
        changed = {field: value for field, value in params.items()
                   if field.startswith("features.") and value != own[field]}
        if not changed or self.spec.data.kind != "prepared":
            return dict(params)
        name = ",".join(f"{field[9:]}={value}" for field, value in changed.items())
        return {**params, "data.path": str(self.folder / "prepared" / name)}

    def _save(self, stopped_by: str = "") -> TuneResult:
        """Write the results, for `embark watch` and for a person, and remove checkpoints that nobody needs."""
        with self._alone():
            result = self._result(stopped_by)
            if result.best is not None:
                best = with_values(self._given, {**self._values(result.trials[result.best].values),
                                                 "name": f"{self.spec.name}-tuned"})
                write_atomic(self.folder / BEST, to_toml(best, only_set=True))
            write_atomic(self.folder / TUNE, json.dumps(to_jsonable(asdict(result)), indent=1) + "\n")
        for number in self._finished.keys() - {result.best}:
            for folder in ("checkpoints", "data"):
                shutil.rmtree(self.folder / trial_name(number) / folder, ignore_errors=True)
        return result

    def _result(self, stopped_by: str = "") -> TuneResult:
        trials = tuple(self._trial_result(one) for one in self._trials())
        choose = max if metric(self._metric).better == "up" else min
        best = choose((one for one in trials if one.value is not None), key=lambda one: one.value or 0.0, default=None)
        seconds = sum(one.seconds for one in trials)
        if len(self._finished) >= self.request.trials:
            stopped_by = "trials"
        elif seconds >= self._limit_s:
            stopped_by = self._limit
        return TuneResult(
            folder=str(self.folder), metric=self._metric, search=self._search, trials=trials,
            num_wanted=self.request.trials, stopped_by=stopped_by,
            best=best.number if best else None, best_value=best.value if best else None,
            own_value=trials[0].value if trials else None,
            best_spec=str(self.folder / BEST) if best else "", seconds=seconds,
            usd=self._usd_per_s and seconds * self._usd_per_s)

    def _alone(self) -> AbstractContextManager[None]:
        """Exclude the other workers."""
        from optuna.storages.journal import JournalFileOpenLock

        return nullcontext() if self.request.workers == 1 else _held(JournalFileOpenLock(str(self.folder / "workers")))

    def _trial_result(self, frozen: optuna.trial.FrozenTrial) -> TrialResult:
        if frozen.number in self._finished:
            return self._finished[frozen.number]
        for field, value in frozen.params.items():  # a search over this space cannot have given other values
            if field not in self._space or not self._space[field].contains(value):
                raise self._damage(f"{field} of trial {frozen.number} is {value!r:.100}")
        run_dir = RunDir(str(self.folder / trial_name(frozen.number)))
        events = read_events(run_dir.events) if run_dir.events.is_file() else []
        seconds = sum(one.held_s for one in attempts(events))
        result = TrialResult(
            number=frozen.number, state=STATES[frozen.state.name], values=frozen.params, run_dir=run_dir.uri,
            value=frozen.value if frozen.state.name == "COMPLETE" else None,
            seconds=seconds, usd=self._usd_per_s and seconds * self._usd_per_s)
        if frozen.state.is_finished():
            self._finished[frozen.number] = result
        return result

    def _damage(self, why: str) -> UserError:
        return UserError(f"{self.folder / JOURNAL}: is damaged: {why}",
                         "remove it: the trials are run again; or --set name=… starts a new search")

    def _emit(self, number: int) -> None:
        """Save, and tell the sinks about a trial."""
        result = self._save()
        self._view.emit(Event("trial", {
            **asdict(result.trials[number]), "best": result.best, "best_value": result.best_value,
            "num_wanted": result.num_wanted}))


class _OpenFanout(Fanout):
    """Sinks that outlive a trial."""

    def close(self) -> None:
        """Leave the sinks open: the next trial goes to the same."""


def trial_name(number: int) -> str:
    return f"trial-{number:04d}"


def _usd_per_s(spec: RunSpec) -> float | None:
    """Return the price of this machine, by the rule of `embark plan` and `embark report`."""
    price, given = price_of_run(spec, {}), usd_per_hour()
    per_hour = price.usd_per_hour if given is None else given
    if spec.place.budget_usd is not None and per_hour is None:
        raise UserError(f"a budget of {format_usd(spec.place.budget_usd)} cannot be enforced. {price.text}",
                        f"set {PRICE} to its dollars per hour, or limit the search by --minutes")
    return per_hour and per_hour / 3600


@contextmanager
def _held(lock: Any) -> Iterator[None]:
    """Hold one of Optuna's locks, which need nothing of the file system, and which it takes from a process that has
    held one for 30 s."""
    lock.acquire()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # this process has held it for so long
            lock.release()
