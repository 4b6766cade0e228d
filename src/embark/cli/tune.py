"""`embark tune`: search the settings that train a spec best."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from embark.errors import ExitCode, UserError
from embark.events.metrics import metric as find_metric
from embark.formatting import format_duration, format_float, format_usd, pluralize
from embark.values import JsonMap
from .console import Console, Flag, OptionalInt, Settings, Spec, Texts

if TYPE_CHECKING:
    from embark.events import Event
    from embark.spec import RunSpec
    from embark.tuning.tune import TuneRequest, TuneResult

Optional = Parameter(show_default=False)
ENDS = {"trials": "all trials are done", "minutes": "the minutes are spent", "usd": "the dollars are spent",
        "": "other workers train the last ones"}


def tune(
    spec: Spec, /, *, trials: int = 30, minutes: Annotated[float | None, Optional] = None,
    metric: Annotated[Literal["auc", "log_loss", "normalized_entropy", "recall_at_k", "ndcg_at_k", "hit_at_k"] | None,
                      Optional] = None,
    search: Texts = (), set_: Settings = (),
    workers: OptionalInt = None, yes: Flag = False, console: Console = Console()
) -> int:
    """Search the settings that train a spec best, by Optuna; bad trials stop early.

    Each trial is a run in ./runs/NAME-tune, where the best becomes best.toml. A stopped search resumes.

    All trials together cost at most place.budget_usd, if the spec has it.

    Parameters
    ----------
    trials
        How many trials in all, the first with the spec's own values.
    minutes
        Stop after so many minutes of training; the trial under way is saved.
    metric
        The held-out metric to improve; by default the AUC, of two towers Recall@K, of the next item NDCG@K.
    search
        Search only these fields: train.learning_rate=0.001..0.1 or train.batch_size=256,512. Repeatable.
    workers
        On Slurm: submit an array of so many jobs, which share the trials. embark status NAME-tune follows it.
    yes
        With --workers: do not ask for confirmation.
    """
    from embark.spec import load_spec
    from embark.spec.train import measured_metrics
    from embark.tuning.tune import Search, TuneRequest
    from embark.tuning.tune import tune as search_settings

    loaded = load_spec(spec, set_)
    request = TuneRequest(trials=trials, minutes=minutes, search=search,
                          metric=metric or measured_metrics(loaded.model)[0], workers=1 if workers is None else workers)
    if workers is not None and "SLURM_ARRAY_TASK_ID" not in os.environ:
        if loaded.place.target != "slurm":
            raise UserError(f'--workers {workers}: place.target is "{loaded.place.target}", and only Slurm has arrays',
                            'leave --workers out, or set place.target = "slurm"')
        place = loaded.place.changed(budget_usd=None)  # the jobs know their price
        Search(loaded.changed(place=place), request, ())
        return _submit(console, loaded, request, yes)
    with console.stages() as show:
        result = search_settings(loaded, request, [TuneView(console, show, str(request.metric))])
    console.show(result, _render)
    return ExitCode.DONE


def _submit(console: Console, spec: RunSpec, request: TuneRequest, yes: bool) -> int:
    """Submit the search as an array, whose jobs are given the same request."""
    from embark.launch.launching import prepare_search
    from embark.launch.shell import Shell
    from embark.render.targets.slurm import Search
    from .launch import submit_prepared

    given = {"trials": request.trials, "metric": request.metric, "workers": request.workers, "minutes": request.minutes}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    options += [f"--search={one}" for one in request.search]
    shell = Shell()
    prepared = prepare_search(Search(spec, tuple(options), request.workers), shell, console.warning)
    return submit_prepared(console, prepared, shell, yes=yes)


class TuneView:
    """Shows a bar for the trial under way, and a line for each that is over."""

    def __init__(self, console: Console, show: Callable[[str, float, str], None], metric: str) -> None:
        self._console, self._show, self._metric, self._label = console, show, metric, find_metric(metric).label
        self._trial: JsonMap = {}
        self._num_steps, self._value = 0, None

    def emit(self, event: Event) -> None:
        values = event.values
        if event.kind == "trial":
            self._trial, self._value = values, None
            if values["state"] != "unfinished":
                self._console.text(_trial_line(values, self._label))
        elif event.kind == "start":
            self._num_steps = values["num_steps"]
        elif event.kind == "eval":
            self._value = values.get(self._metric)
        if event.kind in ("step", "progress", "eval", "trial") and self._num_steps:
            self._show(f"trial {self._trial['number']} of {self._trial['num_wanted']}",
                       values.get("step", 0) / self._num_steps,
                       f"{self._label} {format_float(self._value)}, best {format_float(self._trial['best_value'])}")

    def close(self) -> None:
        """The console closes the bar."""


def _trial_line(trial: JsonMap, label: str) -> str:
    value = "" if trial["value"] is None else f", {label} {format_float(trial['value'])}"
    best = " (best so far)" if trial["best"] == trial["number"] else ""
    return (f"trial {trial['number']}: {trial['state']}{value}{best} in {format_duration(trial['seconds'])}; "
            f"{_settings(trial['values'])}")


def _settings(values: JsonMap) -> str:
    return ", ".join(f"{field.partition('.')[2]} {format(value, '.3g') if isinstance(value, float) else value}"
                     for field, value in values.items())


def _render(console: Console, result: TuneResult) -> None:
    done = [one for one in result.trials if one.value is not None]
    if result.best is None:
        console.result(f"no trial is complete yet ({ENDS[result.stopped_by]}); its runs are in {result.folder}")
        return
    found = find_metric(result.metric)
    sign = -1 if found.better == "up" else 1
    ranked = sorted(done, key=lambda one: sign * (one.value or 0.0))
    console.table(
        [{"trial": one.number, found.label: format_float(one.value), "time": format_duration(one.seconds),
          "settings": _settings(one.values)} for one in ranked[:5]], title="The best trials")
    states = [one.state for one in result.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    cost = "" if result.usd is None else f", {format_usd(result.usd)}"
    console.text(f"{pluralize(len(states), 'trial')} ({counts}), {format_duration(result.seconds)} of training{cost}: "
                 f"{ENDS[result.stopped_by]}")
    own = f"; the spec's own values: {format_float(result.own_value)}" if result.own_value is not None else ""
    console.result(f"best held-out {found.label} {format_float(result.best_value)}, trial {result.best}{own}\n"
                   f"embark train {result.best_spec}")
