"""A run whose store is a bucket: resumed from anywhere, patient with what passes, plain about what does not."""

from __future__ import annotations

import re
import shutil
import signal
import time
from dataclasses import dataclass

import pytest
from integration.cloud.emulators import SECRET, s3, s3_env
from integration.cloud.faulty_proxy import Proxy, proxy_to
from integration.faults.conftest import Run, end_all

pytestmark = pytest.mark.slow

TOKEN = f"session-token-{SECRET}"
HASTY = {"max_retries": 2, "first_wait_s": 0.02, "longest_wait_s": 0.1, "connect_s": 2, "silence_s": 1,
         "request_s": 2, "give_up_s": 3}


@dataclass
class InBucket:
    run: Run
    proxy: Proxy
    env: dict[str, str]

    def start(self, num_ranks: int, *sets: str, **retry: float):
        return self.run.start(
            num_ranks, *sets, env=self.env, hook="integration.faults.hooks:hasty", **{**HASTY, **retry}
        )


@pytest.fixture(scope="module")
def bucket():
    with s3() as emulator:
        yield emulator


@pytest.fixture
def remote(zygote, bucket, tmp_path):
    with proxy_to(bucket.port) as proxy:
        run = Run(zygote, tmp_path, root=f"{bucket.uri}/{proxy.port}", cache=tmp_path / "cache")
        yield InBucket(run, proxy, {**s3_env(proxy.port), "AWS_SESSION_TOKEN": TOKEN})
        end_all(run)


def test_a_killed_run_resumes_from_another_machine(remote, undisturbed, zygote, tmp_path):
    ranks = remote.start(2)
    ranks.until(lambda: bool(remote.run.events("save")))
    ranks.kill(signal.SIGKILL)
    ranks.codes()
    shutil.rmtree(tmp_path / "cache")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = Run(zygote, elsewhere, root=remote.run.root, cache=elsewhere / "cache")
    assert again.ends(2, env=remote.env) == [0, 0], again.output()
    assert [e["step"] for e in again.events("resume")] == [5]
    assert {step: set(result) for step, result in again.losses().items()} == {
        step: set(result) for step, result in undisturbed.losses().items()}


def test_what_passes_is_waited_out(remote, undisturbed):
    ranks = remote.start(2, max_retries=9, give_up_s=60)  # all six faults may meet the same request
    ranks.until(lambda: remote.run.last_step() > 0)
    for fault in ("503", "reset", "429"):
        remote.proxy.fail(fault, 2)
        time.sleep(0.1)
    assert ranks.codes() == [0, 0], remote.run.output()
    assert remote.run.warnings() == ""
    assert remote.run.losses() == undisturbed.losses()


@pytest.mark.parametrize(("fault", "says"), [  # hang: a server that takes a request and never answers
    ("503", r"could not \w+ s3://models/\S+ in 3 attempts: SlowDown"),
    ("hang", r"could not \w+ s3://models/\S+ in \d attempts: "),
    ("expired", r"could not \w+ s3://models/\S+: the credentials have expired"),
])
def test_what_lasts_is_a_warning_while_training_and_70_at_the_end(remote, undisturbed, fault, says):
    ranks = remote.start(2, "train.num_steps=100000", "train.num_epochs=10000",
                         max_retries=1 if fault == "hang" else 2)
    ranks.until(lambda: bool(remote.run.events("save")))
    remote.proxy.fail(fault, 1_000_000)
    ranks.until(lambda: "could not be saved" in remote.run.output())
    num_steps = remote.run.last_step()
    ranks.until(lambda: remote.run.last_step() > num_steps)
    ranks.kill(signal.SIGTERM)
    assert ranks.codes() == [70, 70], remote.run.output()
    output = remote.run.output()
    assert re.search(rf"step \d+ could not be saved: {says}", " ".join(output.split())), output
    assert re.search(f"error: {says}", output), output
    assert "fix: " in output
    assert "Traceback" not in output
    nothing_secret_in(remote)
    remote.proxy.fault = lambda method, path: ""
    assert remote.start(2).codes() == [0, 0], remote.run.output()
    assert remote.run.events("resume")[0]["step"] >= 5


@pytest.mark.parametrize("fault", ["503", "expired"])
def test_what_lasts_from_the_start_is_reported_before_training(remote, fault):
    remote.proxy.fail(fault, 1_000_000)
    assert remote.start(2).codes() == [70, 70], remote.run.output()
    assert re.search(r"error: could not \w+ s3://models/", remote.run.output())
    assert "Traceback" not in remote.run.output()
    assert remote.run.losses() == {}
    nothing_secret_in(remote)


def test_an_outage_at_a_resume_costs_no_checkpoint(remote, undisturbed):
    """To take what cannot be read now for damaged would start over, and then remove complete checkpoints."""
    assert remote.start(2, "train.num_steps=10").codes() == [0, 0], remote.run.output()
    remote.proxy.fault = lambda method, path: "503" if "rank-00000-" in path and method in ("GET", "HEAD") else ""
    assert remote.start(2).codes() == [70, 70], remote.run.output()
    assert "skipped:" not in remote.run.output()
    remote.proxy.fault = lambda method, path: ""
    assert remote.start(2).codes() == [0, 0], remote.run.output()
    assert [e["step"] for e in remote.run.events("resume")] == [10]
    assert remote.run.losses() == undisturbed.losses()


def nothing_secret_in(remote: InBucket) -> None:
    assert any(TOKEN in str(headers) for _, _, headers in remote.proxy.seen)
    texts = [path.read_text(errors="replace") for path in remote.run.directory.rglob("*") if path.is_file()]
    assert not [text for text in texts if SECRET in text]
