"""`embark report` and `embark compare` on run directories, names and uris; the report that a run leaves at its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from embark.__main__ import run as embark
from embark.catalog.pricing import price_of_run
from embark.cli.train import ReportAtEnd
from embark.errors import ExitCode
from embark.events.events import Event, EventLog
from embark.report.context import read_run
from embark.report.record import Record
from embark.spec import RunSpec, resolve, to_toml
from embark.store import open_store

START = {"name": "demo", "device": "cpu", "device_name": "2 CPU threads", "world_size": 1, "num_steps": 4,
         "batch_size": 64, "engine": "pipeline", "precision": "fp32"}  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def sample(auc: float = 0.7, *, end: bool = True, **start: object) -> list[Event]:
    now = time.time() - 10
    events = [Event("start", {**START, **start}, now)]
    for n in range(1, 5):
        values = {"step": n, "loss": 0.6 - n / 100, "auc": auc, "step_s": 1.0, "samples_per_s": 64.0}
        events.append(Event("step", values, now + n))
    events.append(Event("eval", {"step": 4, "auc": auc, "log_loss": 0.5, "num_samples": 9}, now + 5))
    last = Event("end", {"outcome": "done", "step": 4, "samples_per_s": 64.0, "step_s": 1.0}, now + 5)
    return [*events, last] if end \
        else events


@pytest.fixture
def make(tmp_path) -> Callable[..., Path]:
    def make_run(name: str, events: list[Event] | None = None, **spec: object) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "spec.toml").write_text(to_toml(resolve({"name": name, **spec})))
        lines = [event.to_json() + "\n" for event in (sample() if events is None else events)]
        (folder / "events.jsonl").write_text("".join(lines))
        return folder

    return make_run


def test_a_run_is_found_by_name_and_its_report_is_put_beside_it(make, capsys):
    folder = make("demo")
    assert embark(["report", "demo"]) == ExitCode.DONE
    out = capsys.readouterr().out
    assert "Held-out AUC 0.7000" in out
    assert "wrote runs/demo/report.html" in out
    html = (folder / "report.html").read_text()
    assert html.startswith("<!doctype html>")
    assert "The spec names no machine" in html
    assert embark(["report", str(folder)]) == ExitCode.DONE  # again, over its own


def test_a_program_gets_where_it_is_and_how_it_went(make, capsys):
    make("demo", sample(end=False))
    assert embark(["report", "demo", "--json"]) == ExitCode.DONE
    data = json.loads(capsys.readouterr().out)
    assert data["report"] == "runs/demo/report.html"
    assert data["state"] == "running"
    assert data["eval"]["auc"] == 0.7


def test_out_is_a_file_a_uri_or_standard_output(make, tmp_path, capsys):
    make("demo")
    assert embark(["report", "demo", "--out", "sent/mine.html"]) == ExitCode.DONE
    assert (tmp_path / "sent" / "mine.html").is_file()
    assert not (tmp_path / "runs" / "demo" / "report.html").exists()
    capsys.readouterr()
    assert embark(["report", "demo", "--out", "-"]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith("<!doctype html>")
    for words in (["report", "demo"], ["compare", "demo", "demo"]):
        assert embark([*words, "--out", "-", "--json"]) == ExitCode.BAD_INPUT
        captured = capsys.readouterr()
        assert "--out - and --json are mutually exclusive" in captured.err
        assert captured.out == ""
    assert embark(["report", "demo", "--out", "memory://sent/there.html"]) == ExitCode.DONE
    assert open_store("memory://sent").read("there.html").startswith(b"<!doctype html>")


def test_a_file_that_is_no_report_is_not_written_over(make, tmp_path, capsys):
    make("demo")
    (tmp_path / "thesis.html").write_text("years of work")
    assert embark(["report", "demo", "--out", "thesis.html"]) == ExitCode.BAD_INPUT
    assert (tmp_path / "thesis.html").read_text() == "years of work"
    assert "is not a report of Embark" in capsys.readouterr().err
    assert embark(["report", "demo", "--out", "runs"]) == ExitCode.BAD_INPUT
    assert "is a directory" in capsys.readouterr().err


def test_a_run_behind_a_uri_gets_its_report_there(make, capsys):
    folder = make("demo")
    store = open_store("memory://bucket/runs/demo")
    for name in ("spec.toml", "events.jsonl"):
        store.write(name, (folder / name).read_bytes())
    assert embark(["report", "memory://bucket/runs/demo"]) == ExitCode.DONE
    html = store.read("report.html").decode()
    assert "finished" in html
    assert "embark data copy memory://bucket/runs/demo/spec.toml spec.toml" in html


def test_what_is_no_run_is_reported_with_the_nearest_name(make, capsys):
    make("demo")
    assert embark(["report", "demmo"]) == ExitCode.BAD_INPUT
    assert "did you mean 'demo'?" in capsys.readouterr().err


@pytest.mark.parametrize("broken", ["spec.toml", "events.jsonl"])
@pytest.mark.parametrize("how", ["cut", "gone", "another's"])
def test_a_broken_run_still_has_a_report(make, capsys, broken, how):
    folder = make("demo")
    path = folder / broken
    if how == "gone":
        path.unlink()
    else:
        path.write_text(path.read_text()[:150] if how == "cut" else '{"x": [}\n[train]\nunheard = "of"')
    (folder / "checkpoints" / "step-000000002").mkdir(parents=True)
    (folder / "checkpoints" / "step-000000002" / "x").write_text("y")
    assert embark(["report", "demo"]) == ExitCode.DONE
    assert "unfinished" in (folder / "report.html").read_text()


def test_a_fault_in_its_logs_is_diagnosed(make):
    folder = make("demo", [*sample(end=False), Event("error", {"text": "CUDA out of memory. Tried to allocate 2 GiB"},
                                                   time.time())])
    (folder / "rank0.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert embark(["report", "demo"]) == ExitCode.DONE
    html = (folder / "report.html").read_text()
    assert "Diagnosis" in html
    assert "Fix: " in html


def test_a_report_and_embark_diagnose_find_the_same_in_the_same_order(make, capsys):
    folder = make("demo", [*sample(end=False), Event("error", {"text": "CUDA out of memory. Tried to allocate 2 GiB"},
                                                   time.time())])
    (folder / "cluster.log").write_text("InsufficientInstanceCapacity: no p5.48xlarge in us-east-1a\n")
    (folder / "job.yaml").write_text("kind: Job\n")
    elsewhere = folder.parent.parent / "elsewhere.log"
    elsewhere.write_text("OOMKilled\n")
    (folder / "linked.log").symlink_to(elsewhere)
    embark(["diagnose", "runs/demo", "--json"])
    said = json.loads(capsys.readouterr().out)["diagnoses"]
    found = read_run("runs/demo").diagnoses
    assert [(one.code, one.command, one.fix) for one in found] == [
        (one["code"], one["command"], one["fix"]) for one in said]
    assert [one.name for one in found][:2] == ["no-capacity", "gpu-out-of-memory"]
    assert "embark plan runs/demo/spec.toml --across" in found[1].command
    assert "host-out-of-memory" not in [one.name for one in found]


def test_a_fix_that_begins_with_an_identifier_is_shown_as_it_is_written(make):
    folder = make("demo")
    (folder / "rank0.log").write_text("error: 1 mistake in the spec\n  train.batch_size = 9\n"
                                      "    does not divide over 2 ranks\n")
    assert embark(["report", "demo"]) == ExitCode.DONE
    assert "Fix: minReplicas = maxReplicas" in (folder / "report.html").read_text()


def cluster(**values: object) -> RunSpec:
    return resolve({"name": "x", "place": {"machine": "p5.48xlarge", "nodes": 2, "region": "us-west-2", **values}})


def test_the_price_is_of_the_machines_that_it_ran_on():
    start = Record(sample(device="cuda", world_size=16)).start
    price = price_of_run(cluster(), start)
    assert price.text.startswith("Price: 2 x p5.48xlarge on demand in us-west-2, $")
    assert price_of_run(cluster(spot=True), start).usd_per_hour < price.usd_per_hour


@pytest.mark.parametrize(
    ("spec", "events", "why"),
    [
        (None, [], "names no machine"),
        (RunSpec(), [], "names no machine"),
        (cluster(), sample(), "but the run was on 2 CPU threads with 1 of 16 ranks"),
        (cluster(region="mars-north-1"), sample(device="cuda", world_size=16), "no price of 2 x p5.48xlarge"),
        (resolve({"place": {"machine": "p5.47xlarge"}}), [], "No price: "),
    ],
)  # fmt: skip
def test_without_a_price_it_is_reported_why(spec, events, why):
    price = price_of_run(spec, Record(events).start)
    assert price.usd_per_hour is None
    assert why in price.text


def test_two_runs_are_set_side_by_side(make, tmp_path, capsys):
    make("one", sample(0.70))
    make("two", sample(0.75), train={"batch_size": 4096})
    assert embark(["compare", "one", "two", "--out", "both.html"]) == ExitCode.DONE
    assert "two was better" in (tmp_path / "both.html").read_text()
    capsys.readouterr()
    assert embark(["compare", "one", "two", "--json"]) == ExitCode.DONE
    data = json.loads(capsys.readouterr().out)
    assert data["best"] == "two"
    assert [run["values"]["eval_auc"] for run in data["runs"]] == [0.7, 0.75]


def test_one_run_cannot_be_compared(make, capsys):
    make("one")
    assert embark(["compare", "one"]) == ExitCode.BAD_INPUT
    assert "needs two runs" in capsys.readouterr().err


def at_end(folder: Path, events: list[Event]) -> ReportAtEnd:
    """As the trainer tells: the file first, then the sink."""
    log, sink = EventLog(folder / "events.jsonl"), ReportAtEnd()
    for event in events:
        log.emit(event)
        sink.emit(event)
    log.close()
    return sink


def test_a_long_run_leaves_a_small_report_at_its_end(make):
    folder = make("demo", [])
    # A run of some thousand points: what a day of training has.
    events = sample(run_dir=str(folder))
    many = [Event("step", {**events[1].values, "step": n}, events[1].time_s) for n in range(3000)]
    at_end(folder, [*events[:1], *many, *events[1:]])
    report = (folder / "report.html").read_text()
    assert "finished" in report
    assert len(report) < (folder / "events.jsonl").stat().st_size / 5


def test_a_run_that_failed_leaves_one_too_when_its_sinks_are_closed(make):
    folder = make("demo", [])
    sink = at_end(folder, sample(end=False, run_dir=str(folder)))
    assert not (folder / "report.html").exists()
    with (folder / "events.jsonl").open("a") as file:
        file.write(Event("error", {"text": "out of memory"}).to_json() + "\n")
    sink.close()
    assert "Failed at step 4 of 4: out of memory" in (folder / "report.html").read_text()


def test_no_report_is_worth_a_run(make, monkeypatch):
    folder = make("demo", [])
    (folder / "report.html").mkdir()
    at_end(folder, sample(run_dir=str(folder))).close()
    at_end(folder, sample(run_dir="")).close()
    monkeypatch.setattr("embark.report.document.html_page", lambda _: 1 / 0)
    at_end(folder, sample(run_dir=str(folder))).close()
    monkeypatch.setattr("embark.cli.train.MAX_QUICK_BYTES", 1)
    (folder / "report.html").rmdir()
    at_end(folder, sample(run_dir=str(folder))).close()
    assert not (folder / "report.html").exists()


def test_the_summary_says_where_the_report_is(make):
    from embark.events import summary
    from embark.events.summary import History

    folder = make("demo", [])
    history = History()
    history.add(Event("end", {"outcome": "done", "step": 4, "run_dir": str(folder)}))
    assert "report" not in dict(summary.paths(history))
    at_end(folder, sample(run_dir=str(folder)))
    assert dict(summary.paths(history))["report"] == str(folder / "report.html")


def test_a_run_that_lives_in_a_store_takes_its_report_along(make):
    from embark.store import RunDir

    run = RunDir("memory://elsewhere/runs/demo")
    run.path.mkdir(parents=True)
    at_end(run.path, sample(run_dir=run.uri))
    run.publish()
    assert open_store(run.uri).read("report.html").startswith(b"<!doctype html>")


def test_watch_in_a_terminal_tells_a_pipe_how_things_stand(make, capsys):
    make("demo")
    assert embark(["watch", "demo", "--terminal"]) == ExitCode.DONE
    out = capsys.readouterr().out
    assert out.startswith("demo: finished\n")
    assert "64 samples/s" in out
