"""A run that is killed at any instant gives, in the end, the losses of one that was not: bit for bit, every step."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from integration.faults.conftest import Ranks, Run

pytestmark = pytest.mark.slow

NUM_STEPS = 90
AIMS = ("start-up",) * 3 + ("anywhere",) * 2 + ("save",) * 3 + ("between",) * 2
MAX_STEPS_OF_A_LIFE = 9
SEED = 11
"""bench/soak.py draws others, for hours."""
SETS = (f"train.num_steps={NUM_STEPS}", "store.checkpoint_every=5", "train.eval_every=30")


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory) -> Run:
    run = Run(zygote, tmp_path_factory.mktemp("undisturbed"), sets=SETS)
    assert run.ends(2) == [0, 0], run.output()
    assert sorted(run.losses()) == list(range(1, NUM_STEPS + 1))
    return run


def test_ten_kills_at_random_instants_change_no_loss(run, undisturbed):
    run.sets = SETS
    chance = random.Random(SEED)
    landed: Counter[str] = Counter()
    survivors: Counter[int] = Counter()
    aims = list(AIMS)
    chance.shuffle(aims)
    for aim in aims:
        began_s = time.time()
        ranks = run.start(2)
        wait_for_an_instant(run, ranks, aim, chance, start_up_s(undisturbed))
        victims = chance.choice([(0,), (1,), (0, 1)])
        ranks.kill(signal.SIGKILL, *victims)
        where = where_it_landed(run, began_s)
        landed[where] += 1
        if where == "before the first step":
            ranks.kill(signal.SIGKILL)  # as a controller does: a rank may wait for one that never joins
        for survivor in set(range(2)) - set(victims):
            code = ranks.codes()[survivor]
            survivors[code] += 1
            assert code == 70 or where == "before the first step", run.output()
        ranks.codes()
        assert not set(run.committed()) & set(run.unfinished())
    assert run.ends(2) == [0, 0], run.output()

    result = run.losses()
    expected = undisturbed.losses()
    wrong = {step: losses for step, losses in result.items() if set(losses) != set(expected[step])}
    num_again = sum(len(losses) - 1 for losses in result.values())
    print(f"{dict(landed)}, survivors ended with {dict(survivors)}, {num_again} steps were trained again")
    assert sorted(result) == sorted(expected)
    assert not wrong
    assert run.unfinished() == []
    assert evaluations(run) == evaluations(undisturbed)
    assert landed["before the first step"]
    assert landed["in a save"] + landed["in a removal"]
    assert landed["between saves"]


POINTS = {
    "the state is copied": (1, "embark.trainers.torch.checkpoint:TorchCheckpointer._copied", "", "between saves"),
    "a shard is to be written": (1, "embark.store.object_store:LocalStore.write", "rank-00001", "in a save"),
    "the index is to be written": (0, "embark.store.object_store:LocalStore.write", "index.json", "in a save"),
    "the mark is to be written": (0, "embark.store.object_store:LocalStore.create", "commit.json", "in a save"),
    "the mark is written": (0, "embark.trainers.torch.checkpoint:TorchCheckpointer._clean_up", "", "between saves"),
    "an old one has lost its mark": (0, "removal", "", "in a removal"),
}


def test_a_kill_at_each_point_of_a_save_changes_no_loss(run, undisturbed):
    run.sets = SETS
    for point, (rank, method, word, expected) in POINTS.items():
        began_s = time.time()
        ranks = run.start(2, hook="integration.faults.hooks:die_in", victim=rank, method=method, word=word)
        codes = ranks.codes()
        assert codes[rank] == -signal.SIGKILL, f"{point}: {codes}\n{run.output()}"
        assert codes[1 - rank] == 70, f"{point}: {codes}\n{run.output()}"
        assert (point, where_it_landed(run, began_s)) == (point, expected)
    assert run.ends(2) == [0, 0], run.output()
    assert {step: set(losses) for step, losses in run.losses().items()} == {
        step: set(losses) for step, losses in undisturbed.losses().items()}
    assert run.unfinished() == []
    assert run.committed() == undisturbed.committed()


def wait_for_an_instant(run: Run, ranks: Ranks, aim: str, chance: random.Random, start_up_s: float) -> None:
    """By what the run does, not by the clock alone: no machine is too fast or too slow for it."""
    began_s = time.time()
    delay_s = chance.uniform(0.0, 0.02)
    if aim == "start-up":
        delay_s = chance.uniform(0.0, 0.5 * start_up_s)
    elif aim == "anywhere":
        num_starts = len(run.events("start"))
        ranks.until(lambda: len(run.events("start")) > num_starts)
        wanted = run.events("start")[-1]["first_step"] + chance.randint(1, MAX_STEPS_OF_A_LIFE)
        ranks.until(lambda: run.events("step") and run.events("step")[-1]["step"] >= wanted)
        delay_s = chance.uniform(0.0, 0.1)
    elif aim == "save":
        ranks.until(lambda: bool(touched(run, began_s)))
    elif aim == "between":
        ranks.until(lambda: bool([e for e in run.events("save") if e["time_s"] > began_s]))
    until = time.monotonic() + delay_s
    while time.monotonic() < until:
        time.sleep(0.001)


def where_it_landed(run: Run, began_s: float) -> str:
    if unfinished := touched(run, began_s):
        return "in a save" if max(unfinished) > max(run.committed(), default=0) else "in a removal"
    steps = [e for e in run.events("step") if e["time_s"] > began_s]
    return "between saves" if steps else "before the first step"


def touched(run: Run, began_s: float) -> list[int]:
    """Steps that a save was writing, or a removal deleting, in this life; others may be left of earlier ones."""
    folders = {step: run.path / "checkpoints" / f"step-{step:09d}" for step in run.unfinished()}
    return [step for step, folder in folders.items() if changed_s(folder) > began_s]


def changed_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # a survivor removes
        return 0.0


def start_up_s(run: Run) -> float:
    """From the fork, as near as the run's own files tell, to the first step."""
    return run.events("step")[0]["time_s"] - (run.directory / "spec.toml").stat().st_mtime


def evaluations(run: Run) -> dict[int, tuple[float, float]]:
    return {e["step"]: (e["log_loss"], e["auc"]) for e in run.events("eval")}
