"""The search that a run is a trial of, as `embark tune` leaves it beside its trials: what the page shows of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from embark.events.metrics import metric
from embark.formatting import format_float, pluralize, to_finite, to_one_line
from embark.spec.train import HeldOutMetric
from embark.store.run_dir import TUNE

MAX_TRIALS = 500
MAX_BYTES = 4 << 20
METRICS = get_args(HeldOutMetric)


class TuneFile:
    """Of a run in a local folder; read again when it has changed."""

    def __init__(self, run: Path) -> None:
        self._path = run.parent / TUNE if run.name.startswith("trial-") else None
        self._mark: tuple[int, int] | None = None
        self.shown: dict[str, Any] | None = None

    def look(self) -> bool:
        """Whether it has changed."""
        if self._path is None:
            return False
        try:
            status = self._path.lstat()
            mark = (status.st_mtime_ns, status.st_size)
            if mark == self._mark or status.st_size > MAX_BYTES or self._path.is_symlink():
                return False
            self._mark, self.shown = mark, _shown(json.loads(self._path.read_bytes()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # another program's file
            return False
        return True


def _shown(tune: Mapping[str, Any]) -> dict[str, Any]:
    name = tune["metric"] if tune["metric"] in METRICS else METRICS[0]
    better = max if metric(name).better == "up" else min
    trials: list[dict[str, Any]] = [
        {"number": int(one["number"]), "state": to_one_line(one["state"])[:20], "value": to_finite(one["value"]),
         "seconds": to_finite(one["seconds"]), "usd": to_finite(one["usd"]),
         "values": {to_one_line(field)[:60]: to_one_line(_text(value))[:40]
                    for field, value in list(one["values"].items())[:40]}}
        for one in tune["trials"][:MAX_TRIALS]]
    done = [(one["number"], one["value"]) for one in trials if one["value"] is not None]
    best = [better(value for _, value in done[: place + 1]) for place in range(len(done))]
    own = to_finite(tune["own_value"])
    sentence = f"{pluralize(len(trials), 'trial')} of {int(tune['num_wanted'])}"
    if best:
        sentence += f"; best held-out {metric(name).label} {format_float(best[-1])}"
        sentence += f", of the spec's own values {format_float(own)}" if own is not None else ""
    return {"metric": metric(name).label, "sentence": sentence, "best": tune["best"], "trials": trials,
            "numbers": [number for number, _ in done], "values": [value for _, value in done], "best_values": best,
            "best_spec": to_one_line(tune["best_spec"])}


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
