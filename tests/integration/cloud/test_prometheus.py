"""A real Prometheus scrapes a real run and answers with its loss; the rules and the dashboard's queries are its own."""

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import tomli_w
import yaml
from limits import HANG_S
from tiny_runs import TINY

from embark.events.monitoring import alerts, dashboard, rules_text

pytestmark = [pytest.mark.needs("prometheus"), pytest.mark.slow]


def expressions() -> list[str]:
    """Every query of the dashboard, without what Grafana fills in."""
    shown = dashboard()
    queries = [target["expr"] for panel in shown["panels"] for target in panel.get("targets", ())]
    queries += [mark["expr"] for mark in shown["annotations"]["list"]]
    return [query.replace("$run", ".*") for query in queries]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def run(tmp_path, warm_python):
    """A run that goes on until it is told to stop, and the port it answers on."""
    port = free_port()
    spec = {**TINY, "train": {**TINY["train"], "num_steps": 10_000_000},
            "store": {"root": str(tmp_path / "runs"), "checkpoint_every": 200},
            "watch": {"every": 20, "tensorboard": False, "prometheus_port": port, "prometheus_host": "127.0.0.1",
                      "system_every_s": 0.5, "phases_every_s": 1}}
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(spec))
    process = subprocess.Popen([warm_python, "-m", "embark", "train", "tiny.toml"], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    yield process, port, tmp_path / "runs" / "tiny"
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.fixture
def prometheus(run, tmp_path):
    """One that scrapes the run every second."""
    _, run_port, _ = run
    port = free_port()
    (tmp_path / "rules.yaml").write_text(rules_text())
    config = tmp_path / "prometheus.yaml"
    config.write_text(yaml.safe_dump({
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "embark", "static_configs": [{"targets": [f"127.0.0.1:{run_port}"]}]}],
    }))
    checked = subprocess.run(["promtool", "check", "config", str(config)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    log = (tmp_path / "prometheus.log").open("wb")
    process = subprocess.Popen(["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                                f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT)
    yield Api(port)
    process.terminate()
    process.wait(HANG_S)
    log.close()


class Api:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, what: str, **words: str):
        with self._opener.open(f"{self._url}{what}?{urllib.parse.urlencode(words)}", timeout=HANG_S) as answer:
            payload = json.load(answer)
        assert payload["status"] == "success"
        return payload["data"]

    def query(self, expression: str):
        return self.ask("query", query=expression)["result"]

    def wait_for(self, expression: str):
        until = time.monotonic() + HANG_S
        while time.monotonic() < until:
            try:
                if found := self.query(expression):
                    return found
            except OSError:
                pass
            time.sleep(0.25)
        raise AssertionError(f"nothing came of {expression}")


def test_a_real_prometheus_answers_with_the_loss_of_a_real_run(run, prometheus):
    process, _, run_dir = run
    [loss] = prometheus.wait_for('embark_loss{run="tiny"}')
    until = time.monotonic() + HANG_S
    while not (is_told := float(loss["value"][1]) in {e["loss"] for e in events(run_dir, "step")}) \
            and time.monotonic() < until:
        time.sleep(0.25)  # the last line, which may be half written, is not read
    assert is_told
    [(_, first)] = [one["value"] for one in prometheus.wait_for("embark_last_step")]
    [moved] = prometheus.wait_for(f"embark_last_step > {first}")
    assert float(moved["value"][1]) > float(first)
    assert [one["metric"]["phase"] for one in prometheus.wait_for('embark_phase_seconds{phase="dense"}')] == ["dense"]
    assert 0 <= float(prometheus.wait_for("embark_cpu_ratio")[0]["value"][1]) <= 1
    assert float(prometheus.wait_for("embark_saves_total > 0")[0]["value"][1]) >= 1
    assert [one["value"][1] for one in prometheus.query("up")] == ["1"]

    answered = {expression: len(prometheus.query(expression)) for expression in expressions()}
    empty = {expression.partition("{")[0] for expression, num in answered.items() if not num}
    # Of GPUs, several tasks, retrieval, the next item, streams and dynamic tables, which this run has not.
    others = "gpu|_task_|_at_k$|_ranking_|_stream_|_ids?_|_table_fullness"
    of_others = {name for name in empty if re.search(others, name)}
    assert empty <= of_others | {
        "embark_auc", "embark_best_auc", "embark_best_log_loss", "embark_eval_seconds", "embark_train_seconds",
        "embark_predicted_step_seconds", "changes(embark_saves_total", "changes(embark_resumes_total",
        "changes(embark_errors_total"}

    groups = prometheus.ask("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(rules) == {one.name for one in alerts()}
    until = time.monotonic() + HANG_S
    while any(rule["health"] == "unknown" for rule in rules.values()) and time.monotonic() < until:
        time.sleep(0.25)
        rules = {rule["name"]: rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]}
    assert {rule["health"] for rule in rules.values()} == {"ok"}
    assert not [name for name, rule in rules.items() if rule["state"] == "firing"]

    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 75
    assert events(run_dir, "end")[-1]["outcome"] == "interrupted"


def test_a_port_that_is_taken_is_reported_and_stops_nothing(tmp_path):
    from embark.spec import resolve
    from embark.trainers import train

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        values = train(resolve(TINY, [f"store.root={tmp_path}", f"watch.prometheus_port={port}",
                                      "watch.prometheus_host=127.0.0.1"]))
    assert values["outcome"] == "done"
    notes = [e["text"] for e in events(Path(values["run_dir"]), "note")]
    assert [note for note in notes if note.startswith("no Prometheus endpoint: Address already in use")]


def events(run_dir: Path, kind: str):
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines[:-1] if kind == "step" else lines) if e["event"] == kind]
