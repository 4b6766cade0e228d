"""`embark tune` prints every trial, the best ones, and the command that trains the best."""

from __future__ import annotations

import json

import pytest
from counting_trainer import Instants, backend_of
from tiny_runs import TINY

from embark.__main__ import run
from embark.spec import load_spec, resolve, to_toml


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.setattr("embark.run.loop.log_prediction", lambda *_: None)
    backend = backend_of(Instants(), lambda spec, steps: 0.6 + spec.train.learning_rate)
    monkeypatch.setattr("embark.tuning.tune.open_backend", lambda spec: backend)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(to_toml(resolve(TINY, ["watch.every=100"]), only_set=True))
    return ["tune", "tiny.toml", "--trials", "2", "--search", "train.learning_rate=0.01..0.3"]


def test_trials_are_printed_as_they_end_and_the_best_as_a_command(words, capsys):
    assert run(words) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("trial 0: complete, AUC 0.6100 (best so far) in ")
    assert first.endswith("; learning_rate 0.01")
    assert second.startswith("trial 1: ")
    assert rest[0] == "The best trials"
    rate = load_spec("runs/tiny-tune/best.toml").train.learning_rate
    assert rate > 0.01
    assert rest[-2:] == [f"best held-out AUC {0.6 + rate:.4f}, trial 1; the spec's own values: 0.6100",
                         "embark train runs/tiny-tune/best.toml"]
    assert run([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["best"], shown["stopped_by"], len(shown["trials"])) == (1, "trials", 2)
    assert (shown["best_value"], shown["search"]) == (0.6 + rate, {"train.learning_rate": "0.01..0.3"})


@pytest.mark.parametrize(("more", "said"), [
    (["--workers", "2"], 'place.target is "job", and only Slurm has arrays'),
    (["--workers", "0", "--set", "place.target=slurm"], "--workers 0 is not a positive number"),
    (["--workers", "2", "--set", "place.target=slurm", "--search", "train.nothing=1..2"], "train.nothing"),
])
def test_a_wrong_array_is_refused_before_it_is_submitted(words, capsys, more, said):
    assert run([*words, *more]) == 64
    assert said in capsys.readouterr().err


def test_a_budget_without_a_price_is_refused_with_the_way_out(words, capsys):
    assert run([*words, "--set", "place.budget_usd=3"]) == 64
    assert "set EMBARK_USD_PER_HOUR to its dollars per hour" in capsys.readouterr().err
