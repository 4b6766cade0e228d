"""A run that is killed at any instant gives, in the end, the losses of one that was not: bit for bit, every step."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from faults.conftest import Ranks, Run

pytestmark = pytest.mark.slow

NUM_STEPS = 90
KILLS_PER_SEED = 10
MAX_STEPS_OF_A_LIFE = 9
SEEDS = (11, 23, 37, 41, 59)
SETS = (f"train.num_steps={NUM_STEPS}", "store.checkpoint_every=5", "train.eval_every=30")
CONTROLLER_WAITS_S = 3.0
"""As a job controller does, the drill ends a rank that outlives the other for so long."""


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory) -> Run:
    run = Run(zygote, tmp_path_factory.mktemp("undisturbed"), sets=SETS)
    assert run.ends(2) == [0, 0], run.output()
    assert sorted(run.losses()) == list(range(1, NUM_STEPS + 1))
    return run


@pytest.mark.parametrize("seed", SEEDS)
def test_fifty_kills_at_random_instants_change_no_loss(run, undisturbed, seed):
    run.sets = SETS
    chance = random.Random(seed)
    landed: Counter[str] = Counter()
    survivors: Counter[int] = Counter()
    for _ in range(KILLS_PER_SEED):
        began_s = time.time()
        ranks = run.start(2)
        wait_for_an_instant(run, ranks, chance)
        victims = chance.choice([(0,), (1,), (0, 1)])
        ranks.kill(signal.SIGKILL, *victims)
        landed[where_it_landed(run, began_s)] += 1
        survivors.update(code for code in ends(ranks) if code != -signal.SIGKILL)
        assert not set(run.committed()) & set(run.unfinished())
    assert run.ends(2) == [0, 0], run.output()

    told = run.losses()
    expected = undisturbed.losses()
    wrong = {step: losses for step, losses in told.items() if set(losses) != set(expected[step])}
    num_again = sum(len(losses) - 1 for losses in told.values())
    print(f"seed {seed}: {dict(landed)}, survivors ended with {dict(survivors)}, {num_again} steps were trained again")
    assert sorted(told) == sorted(expected)
    assert not wrong, f"seed {seed}"
    assert run.unfinished() == []
    assert evaluations(run) == evaluations(undisturbed)
    assert set(survivors) <= {70}, run.output()
    assert landed["before the first step"]
    assert landed["in a save"] + landed["in a removal"]
    assert landed["between saves"]


def wait_for_an_instant(run: Run, ranks: Ranks, chance: random.Random) -> None:
    """In start-up, or some steps on, and then anywhere within a step or two: no faster machine outruns it."""
    began = time.monotonic()
    if chance.random() < 0.3:
        delay_s = chance.uniform(0.0, 0.5)
    else:
        num_starts = len(run.events("start"))
        ranks.until(lambda: len(run.events("start")) > num_starts)
        first = run.events("start")[-1]["first_step"]
        wanted = first + chance.randint(1, MAX_STEPS_OF_A_LIFE)
        ranks.until(lambda: [e for e in run.events("start", "step")[-10:] if e.get("step", 0) >= wanted])
        began = time.monotonic()
        delay_s = chance.uniform(0.0, 0.1)
    while time.monotonic() < began + delay_s:
        time.sleep(0.001)


def where_it_landed(run: Run, began_s: float) -> str:
    folders = {step: run.path / "checkpoints" / f"step-{step:09d}" for step in run.unfinished()}
    touched = [step for step, folder in folders.items() if changed_s(folder) > began_s]  # the rest is of other lives
    if touched:
        return "in a save" if max(touched) > max(run.committed(), default=0) else "in a removal"
    steps = [e for e in run.events("step") if e["time_s"] > began_s]
    return "between saves" if steps else "before the first step"


def changed_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # a survivor removes
        return 0.0


def ends(ranks: Ranks) -> list[int]:
    until = time.monotonic() + CONTROLLER_WAITS_S
    while ranks.are_up() and time.monotonic() < until:
        time.sleep(0.01)
    ranks.kill(signal.SIGKILL)
    return ranks.codes()


def evaluations(run: Run) -> dict[int, tuple[float, float]]:
    return {e["step"]: (e["log_loss"], e["auc"]) for e in run.events("eval")}
