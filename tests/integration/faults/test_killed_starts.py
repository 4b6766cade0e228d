"""Every start costs money, also one that is killed while it loads: it counts, and the budget ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from integration.cloud.emulators import s3, s3_env
from integration.faults.zygote import free_port
from limits import HANG_S

from embark.errors import ExitCode
from embark.store import RunDir
from embark.store.lease import newest_holder

pytestmark = pytest.mark.slow
LASTS_S = 3.5
NUM_RENEWALS = 2


@dataclass
class Starts:
    """Starts of one run that has a budget of $100, on machines of $10 a second."""

    folder: Path
    root: str
    env: dict[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        sets = (f"store.root={self.root}", "name=bud", "train.num_steps=1000000", "place.device=cpu",
                "place.budget_usd=100")
        return ["laptop", *(word for one in sets for word in ("--set", one))]

    def embark(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "embark", *words], cwd=self.folder, capture_output=True, text=True,
                              timeout=HANG_S, env=self.environment)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "EMBARK_USD_PER_HOUR": "36000", "EMBARK_CACHE": str(self.folder / "cache"), **self.env}

    def kill(self, number: int) -> float:
        """Kill a start that waits for a second rank, 3.5 seconds after it began; return how long it lived."""
        began_s = time.monotonic()
        alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        process = subprocess.Popen([sys.executable, "-m", "embark", "train", *self.words], cwd=self.folder,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   env={**self.environment, **alone})
        store = RunDir(f"{self.root}/bud").store
        while (holder := newest_holder(store)) is None or (holder.token, holder.num_renewals) < (number, NUM_RENEWALS):
            assert process.poll() is None
            assert time.monotonic() < began_s + HANG_S
            time.sleep(0.1)
        time.sleep(max(0.0, began_s + LASTS_S - time.monotonic()))
        process.kill()
        process.wait()
        return time.monotonic() - began_s


@pytest.fixture(params=["folder", "bucket"])
def starts(request, tmp_path, monkeypatch) -> Iterator[Starts]:
    if request.param == "folder":
        yield Starts(tmp_path, str(tmp_path / "runs"))
        return
    with s3() as emulator:
        env = s3_env(emulator.port)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield Starts(tmp_path, f"{emulator.uri}/runs", env)


def test_starts_killed_while_loading_are_counted_and_spend_the_budget(starts, tmp_path):
    began_s = time.monotonic()
    lived_s = sum(starts.kill(number) for number in range(1, 5))
    assert lived_s >= 4 * LASTS_S

    run = f"{starts.root}/bud"
    shown = starts.embark("cost", run, "--json")
    assert shown.returncode == ExitCode.OTHER, shown.stderr
    cost = json.loads(shown.stdout)
    assert cost["spending"]["num_without_step"] == 4
    assert 10 < cost["held_s"] < time.monotonic() - began_s + 10
    assert cost["spent_usd"] == pytest.approx(10 * cost["held_s"])
    assert 0 < cost["spending"]["estimated_s"] < cost["held_s"]
    assert cost["budget_verdict"] == "the budget of $100.00 is spent"
    text = starts.embark("cost", run).stdout
    assert "4 starts ended before the first step: $" in text
    assert "estimated" in text

    refused = starts.embark("train", *starts.words)
    assert refused.returncode == ExitCode.BAD_INPUT, refused.stderr
    assert "of its budget of $100.00" in refused.stderr
