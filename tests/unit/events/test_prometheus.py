"""Prometheus' own tools take what is made for them, and its names say what ours do."""

import json
import math
import re
import subprocess
import urllib.request

import pytest
from limits import HANG_S

from embark.errors import MissingPackage
from embark.events.events import Event
from embark.events.metrics import METRICS, metric
from embark.events.monitoring import alerts, rules_text
from embark.events.sinks.prometheus import PrometheusSink, exposition, prometheus_name

SYSTEMS = [{"host": "node-0", "rank": 0, "cpu_percent": 50.0, "host_used_bytes": 98, "host_bytes": 100,
            "gpus": [{"index": 3, "util_percent": 25.0, "temperature_c": 91.0}]}]


def values(page):
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if line[:1] != "#"}


def test_the_newest_value_of_every_series_is_reported(make_events):
    page = values(exposition({"demo": make_events()}))
    last = [e for e in make_events() if e.kind == "step"][-1].values
    assert page['embark_loss{run="demo"}'] == last["loss"]
    assert page['embark_auc{run="demo",split="train"}'] == page['embark_auc{run="demo",split="eval"}'] == last["auc"]
    assert page['embark_samples_per_second{run="demo"}'] == 41_234
    assert page['embark_saves_total{run="demo"}'] == 1
    assert page['embark_is_running{run="demo"}'] == 0


def test_ranks_machines_and_gpus_have_labels_of_their_own():
    fields = {"step": 5, "step_s": [0.1, 0.2], "input_s": [0.0, 0.1], "systems": SYSTEMS}
    page = values(exposition({"a": [Event("ranks", fields)], "b": [Event("ranks", fields)]}))
    assert page['embark_rank_step_seconds{rank="1",run="b"}'] == 0.2
    assert page['embark_cpu_ratio{host="node-0",run="a"}'] == 0.5
    assert page['embark_gpu_util_ratio{gpu="3",host="node-0",run="a"}'] == 0.25


def test_a_loss_that_was_no_number_is_reported_as_such_from_a_file_too():
    page = values(exposition({"demo": [Event("step", {"step": 1, "loss": None, "learning_rate": 0.1})]}))
    assert math.isnan(page['embark_loss{run="demo"}'])


def test_names_of_any_kind_do_not_break_the_page(make_events):
    hostile = 'x"} 1\nembark_loss{run="forged'
    fields = {"systems": [{"host": 'h"\n\\', "cpu_percent": 1.0}]}
    page = exposition({hostile: [*make_events(), Event("ranks", fields)]})
    assert not [line for line in page.splitlines() if line.startswith('embark_loss{run="forged')]
    assert len([line for line in page.splitlines() if line.startswith("embark_loss{")]) == 1


def test_every_name_is_there_once():
    names = [prometheus_name(one) for one in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"embark_[a-z][a-z0-9_]*[a-z0-9]", name) for name in names)
    assert prometheus_name(metric("step_s")) == "embark_step_seconds"
    assert prometheus_name(metric("num_saves")) == "embark_saves_total"
    assert prometheus_name(metric("last_event_s")) == "embark_last_event_timestamp_seconds"


def test_a_run_answers_while_it_goes_and_not_after(make_events):
    sink = PrometheusSink("demo", 0, "127.0.0.1")
    url = f"http://127.0.0.1:{sink._server.server_port}/metrics"
    try:
        for event in make_events()[:6]:
            sink.emit(event)
        page = urllib.request.urlopen(url, timeout=HANG_S).read().decode()
        assert values(page)['embark_is_running{run="demo"}'] == 1
    finally:
        sink.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=HANG_S)


def test_without_the_package_the_error_says_what_to_install(monkeypatch, make_events):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(MissingPackage) as caught:
        exposition({"demo": make_events()})
    assert 'pip install "embark-rec[prometheus]"' in caught.value.fix


@pytest.mark.needs("prometheus")
def test_promtool_takes_the_page(make_events):
    fields = {"step": 5, "step_s": [0.1, 0.2], "input_s": [0.0, 0.1], "systems": SYSTEMS}
    page = exposition({"demo": [*make_events(), Event("ranks", fields)]})
    checked = promtool("check", "metrics", stdin=page)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@pytest.mark.needs("prometheus")
def test_promtool_takes_the_rules(tmp_path):
    (tmp_path / "rules.yaml").write_text(rules_text())
    checked = promtool("check", "rules", str(tmp_path / "rules.yaml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(alerts())} rules found" in checked.stdout


WRONG = {
    "EmbarkLossIsNaN": (("embark_loss", "0.5x5" + 6 * " NaN"), 10),
    "EmbarkRunFailed": (("embark_errors_total", "0x5 1x10"), 8),
    "EmbarkStalled": (("embark_last_event_timestamp_seconds", "0x60"), 30),
    "EmbarkIdleGpus": (('embark_gpu_util_ratio{gpu="0",host="a"}', "0.01x60"), 40),
    "EmbarkSlowRank": (("embark_rank_step_seconds", {0: "0.1x60", 1: "0.1x60", 2: "0.2x60"}), 20),
    "EmbarkWaitsForInput": (("embark_rank_input_seconds", {0: "0.06x60", 1: "0x60"}), 20),
    "EmbarkSlowerThanPredicted": (("embark_predicted_step_seconds", "0.04x60"), 40),
    "EmbarkNoCheckpoint": (("embark_saved_step", "100x800"), 700),
    "EmbarkMemoryFull": (('embark_host_used_bytes{host="a"}', "98x60"), 20),
    "EmbarkHotGpu": (('embark_gpu_temperature_celsius{gpu="0",host="a"}', "95x60"), 20),
}
RIGHT = {
    "embark_is_running": "1x800", "embark_loss": "0.5x800", "embark_errors_total": "0x800",
    "embark_last_event_timestamp_seconds": "0+60x800", 'embark_gpu_util_ratio{gpu="0",host="a"}': "0.9x800",
    'embark_rank_step_seconds{rank="0"}': "0.1x800", 'embark_rank_step_seconds{rank="1"}': "0.1x800",
    'embark_rank_step_seconds{rank="2"}': "0.11x800", 'embark_rank_input_seconds{rank="0"}': "0.001x800",
    "embark_step_seconds": "0.1x800", "embark_predicted_step_seconds": "0.09x800", "embark_saved_step": "0+1x800",
    "embark_last_step": "0+5x800", 'embark_host_used_bytes{host="a"}': "50x800",
    'embark_host_bytes{host="a"}': "100x800", 'embark_gpu_temperature_celsius{gpu="0",host="a"}': "60x800",
}


@pytest.mark.needs("prometheus")
@pytest.mark.parametrize("alert", ["", *(one.name for one in alerts())])
def test_each_rule_fires_for_what_it_is_there_for_and_no_other_does(tmp_path, alert):
    series, minutes = dict(RIGHT), 720
    if alert:
        (name, result), minutes = WRONG[alert]
        by_rank = result if isinstance(result, dict) else {None: result}
        for rank, text in by_rank.items():
            series[name if rank is None else f'{name}{{rank="{rank}"}}'] = text
    (tmp_path / "rules.yaml").write_text(rules_text())
    (tmp_path / "test.yaml").write_text(json.dumps({
        "rule_files": ["rules.yaml"], "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": [{"series": with_run(k), "values": v} for k, v in series.items()],
                   "promql_expr_test": [{"expr": f'count(ALERTS{{alertstate="firing",alertname="{one.name}"}}) or '
                                                 "vector(0)", "eval_time": f"{minutes}m",
                                         "exp_samples": [{"labels": "{}", "value": int(one.name == alert)}]}
                                        for one in alerts()]}],
    }))
    tested = promtool("test", "rules", str(tmp_path / "test.yaml"))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def with_run(series):
    name, _, labels = series.partition("{")
    return f'{name}{{run="demo"{"," + labels if labels else "}"}'


def promtool(*words, stdin=None):
    return subprocess.run(["promtool", *words], input=stdin, capture_output=True, text=True, timeout=HANG_S,
                          check=False)
