"""Optuna's study in a folder of its own: a journal file, so that a killed search resumes and no server is needed."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embark.errors import UserError
from embark.events.metrics import metric
from embark.events.sinks.services import require_packages
from embark.formatting import format_float, pluralize
from embark.tuning.search_space import SearchSpace

if TYPE_CHECKING:
    import optuna

JOURNAL = "optuna.journal"
SUBJECT = "subject"  # What is tuned, and over which values.
NUM_STARTUP_TRIALS = 5  # Complete ones, before any is pruned.
NUM_KEPT_EVALUATIONS = 2  # The first ones of a trial, by which it is not pruned yet.


class Study:
    """The trials so far, in Optuna's words; of the process that holds the folder's lease.

    What a trial tries is a function of the seed, its number and the trials before it, so a search that was killed and
    resumed is the search that was not.
    """

    def __init__(self, folder: Path, metric_name: str, space: SearchSpace, seed: int) -> None:
        require_packages("embark tune needs the optuna package, which is not installed", "tune", "optuna")
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = folder / JOURNAL
        _cut_partial_line(journal)
        Path(f"{journal}.lock").unlink(missing_ok=True)  # of a process that was killed: the lease excludes a live one
        self._folder, self._metric, self._space, self._seed = folder, metric(metric_name), space, seed
        self._study = optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))), study_name="tune",
            load_if_exists=True, direction="maximize" if self._metric.better == "up" else "minimize",
            pruner=optuna.pruners.MedianPruner(n_startup_trials=NUM_STARTUP_TRIALS,
                                               n_warmup_steps=NUM_KEPT_EVALUATIONS + 1))

    def start(self, subject: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Begin with the values `own`, or resume a study of the same `subject`; another one is refused."""
        subject = json.loads(json.dumps(subject))
        before = self._study.user_attrs.get(SUBJECT, subject)
        changed = sorted(name for name in {*before, *subject} if before.get(name) != subject.get(name))
        if changed:
            raise UserError(f"{self._folder} has the trials of another search: {', '.join(changed)} changed",
                            fix="--set name=… starts a new search")
        self._study.set_user_attr(SUBJECT, subject)
        if not self._study.get_trials(deepcopy=False):
            self._study.enqueue_trial(dict(own))

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Those that were started."""
        return [one for one in self._study.get_trials() if one.state.name != "WAITING"]

    @property
    def best_number(self) -> int | None:
        done = [one for one in self.trials() if one.state.name == "COMPLETE"]
        sign = 1 if self._metric.better == "up" else -1
        return max(done, key=lambda one: (sign * (one.value or 0.0), -one.number)).number if done else None

    @contextmanager
    def next_trial(self) -> Iterator[tuple[optuna.Trial, dict[str, Any]]]:
        """The one that was interrupted, or a new one, with its values."""
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of samplers that are new, and of evaluations reported twice
            open_ids = [one._trial_id for one in self.trials() if not one.state.is_finished()]
            number = len(self.trials()) - len(open_ids)
            self._study.sampler = optuna.samplers.TPESampler(seed=self._seed + number, multivariate=True)
            trial = optuna.Trial(self._study, open_ids[0]) if open_ids else self._study.ask()
            yield trial, {field: dimension.suggest(trial, field) for field, dimension in self._space.items()}

    def why_pruned(self, trial: optuna.Trial) -> str:
        """Why a trial is not worth its remaining steps; empty where it is."""
        if not trial.should_prune():
            return ""
        reported = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        value = reported[max(reported)]
        return (f"pruned after {pluralize(len(reported), 'evaluation')}: held-out {self._metric.label} "
                f"{format_float(value)} is worse than the median of the trials before")

    def tell(self, trial: optuna.Trial, state: str, value: float | None = None) -> None:
        """How a trial ended: `complete`, `pruned` or `failed`."""
        import optuna

        names = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
        is_number = value is not None and math.isfinite(value)
        self._study.tell(trial, value if is_number and state == "complete" else None,
                         state=optuna.trial.TrialState[names[state]])


def _cut_partial_line(journal: Path) -> None:
    """A process that was killed while it wrote leaves a line without an end, which Optuna would refuse."""
    if journal.is_file():
        text = journal.read_bytes()
        if not text.endswith(b"\n"):
            with journal.open("r+b") as file:
                file.truncate(text.rfind(b"\n") + 1)
