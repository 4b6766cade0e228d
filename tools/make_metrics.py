"""Writes docs/reference/metrics.md: every metric, from the one list of names, and where to see it.

`make docs` runs it. The tables are generated from the list; the text is here.
"""

from __future__ import annotations

import sys

from embark.events.metrics import GROUPS, METRICS, Metric
from embark.events.monitoring import alerts
from embark.events.sinks.prometheus import prometheus_name

PLACES = (
    ("`events.jsonl` in the run directory", "always",
     "`step_s` of `step` events, `auc` of `step` and `eval`, `power_w` in `ranks`"),
    ("TensorBoard", "`watch.tensorboard = true`, the default",
     "`train/step_s`, `train/auc` and `eval/auc`, `ranks/gpu_power_w/HOST/GPU`"),
    ("Prometheus, Grafana", "`watch.prometheus_port = 9464`",
     "`embark_step_seconds`, `embark_auc{split}`, `embark_gpu_power_watts{host,gpu}`"),
    ("CloudWatch", '`watch.sinks = ["cloudwatch"]`',
     "`step_s`, `auc`, `gpu_power_w` in the namespace `Embark`; run and labels are dimensions"),
    ("Azure Monitor, Cloud Monitoring, any collector", '`watch.sinks = ["otlp"]`',
     "`embark.step_s`, `embark.auc`, `embark.gpu_power_w`; run and labels are attributes"),
    ("Weights & Biases, MLflow", '`watch.sinks = ["wandb", "mlflow"]`',
     "`train/step_s`, `train/auc` and `eval/auc`; nothing of single machines"),
    ("`/metrics` of `embark watch`", "always",
     "the names of Prometheus; only there: served traffic, of servers that `embark serve --record` records"),
)

HEAD = """# Metrics, and where to see them

Every metric has one name. It is logged to `events.jsonl`; the terminal, the page of `embark watch`, TensorBoard,
Prometheus, Grafana, CloudWatch, OpenTelemetry collectors, W&B and MLflow show the same number under the same name.

{places}
None of them can stop or slow a run: a separate thread sends the newest value of each series (to W&B and MLflow, every
point) every `watch.send_every_s` seconds and once more at the end, where the run waits 15 seconds at most, and 3 if it
was stopped; a service that fails is reported once, as a note, and retried. Fields of `[watch]`:
[spec.md](spec.md).

## What measuring costs

- One thread of one rank samples each machine every `watch.system_every_s` seconds: `/proc`, the counters of RDMA
  devices, and NVML. A sample takes under a millisecond of processor time without GPUs.
- The times of all ranks are part of the gather of a logged step (`watch.every`): one gather, not two.
- The phases of a step are measured by torch's profiler over three steps, once a minute on a CPU, where that costs some
  hundredths of a second (`bench/watching.py`). On a GPU it is off unless `watch.phases_every_s` is set: attaching the
  profiler takes a time that depends on the driver.
- Losses are bit-identical with and without all measurements; tests check that.

`input_s` is time without a batch. On a GPU the host often waits for the device to release a buffer, which is not a lack
of data: there the gap in the device's stream is measured, by one event before and one after the wait. `rank_step_s`
excludes the wait for the other ranks to agree on the next step; `rank_own_s`, measured with the phases, excludes waits
within a step too.

The `auc` of `eval` events is exact. That of `step` events counts predictions in bins; `auc_error` in the same event
bounds the difference to the exact AUC, and is shown (`0.5210 ±0.04`) where it is 0.001 or more.

## Metrics
"""

PROMETHEUS = """
## Prometheus and Grafana

```toml
[watch]
prometheus_port = 9464          # rank 0 serves /metrics; pip install "embark-rec[prometheus]"
```

```yaml
# prometheus.yaml
rule_files: [embark_rules.yaml]
scrape_configs:
- job_name: embark
  scrape_interval: 15s
  static_configs: [{targets: ["HOST-OF-RANK-0:9464"]}]
```

Generate the rules and the dashboard from the same list:

```bash
python -m embark.events.monitoring monitoring      # monitoring/embark_rules.yaml, monitoring/embark_dashboard.json
```

`promtool check rules embark_rules.yaml` passes. In Grafana: Dashboards, New, Import, the JSON file; then choose
the Prometheus data source. For a spec with `watch.prometheus_port` on Kubernetes, `embark render` writes both, and the
objects with which the cluster's Prometheus finds the run.

The endpoint ends with its run, so `EmbarkRunFailed` fires only if another endpoint still serves the run's metrics, such
as `/metrics` of `embark watch`. `embark.events.sinks.prometheus.exposition` generates the same text from the events of
runs.

| alert | when | for | what it says |
|---|---|---|---|
"""

CLOUDS = """
## Weights & Biases and MLflow

```toml
[watch]
sinks = ["wandb", "mlflow"]     # or one of them; pip install "embark-rec[wandb,mlflow]"
project = "ads"                 # W&B project, MLflow experiment; default WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME, embark
```

```bash
export WANDB_API_KEY=…                              # or `wandb login`; WANDB_ENTITY and WANDB_BASE_URL if you need them
export MLFLOW_TRACKING_URI=http://mlflow:5000       # and MLFLOW_TRACKING_TOKEN, or a user name and password
```

Both get every point of `step`, `eval` and `phases` events, the resolved spec (as W&B's config and MLflow's parameters,
secrets cut out) and how the run ended. A resumed run continues the same run there: its id is in `tracking_id`, in the
run directory. Fields that a later start changed, such as a larger `train.num_steps`, are updated in W&B's config;
MLflow cannot change a parameter, so the new value is a tag of that name. Steps trained again after a resume are
there twice, with the same values. W&B's own recording of console output, code, arguments and machines is off.

`WANDB_MODE=offline` needs no server: the files are in `wandb/` of the run directory, on the machine of rank 0, and
`wandb sync runs/NAME/wandb/offline-run-*` sends them later. While a service does not answer, the newest 20,000 points
wait for it. W&B's client can keep a process from exiting for 10 seconds more.

## CloudWatch

```toml
[watch]
sinks = ["cloudwatch"]          # pip install "embark-rec[cloud]"
cloudwatch_namespace = "Embark"
send_every_s = 60
```

Region, credentials and endpoint are those of the AWS tools: `AWS_REGION`, a profile, the machine's role. The role needs
`cloudwatch:PutMetricData` and nothing else. Every combination of a metric and its labels is billed as one custom
metric; `watch.system_every_s = 0` omits machines and ranks, which are most of them. CloudWatch does not support NaN: a
NaN loss is missing there.

## Azure Monitor, Cloud Monitoring and others, through OpenTelemetry

```toml
[watch]
sinks = ["otlp"]                # pip install "embark-rec[otlp]"
```

Metrics are sent as OTLP over HTTP to the endpoint in OpenTelemetry's own variables, by default `http://localhost:4318`,
where a collector on the machine listens.

```bash
export OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318
export OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20TOKEN     # if it requires one
export OTEL_RESOURCE_ATTRIBUTES=deployment.environment=production
```

The clouds require their own credentials on every request, which the collector manages. A collector for both clouds:

```yaml
receivers: {otlp: {protocols: {http: {endpoint: "0.0.0.0:4318"}}}}
processors: {batch: {}}
exporters:
  azuremonitor: {connection_string: "${env:APPLICATIONINSIGHTS_CONNECTION_STRING}"}   # Azure Monitor
  googlemanagedprometheus: {}          # Cloud Monitoring; the machine's credentials
service:
  pipelines: {metrics: {receivers: [otlp], processors: [batch], exporters: [azuremonitor, googlemanagedprometheus]}}
```

Both exporters are in the collector's `contrib` build. They were not tested against the clouds themselves; what a run
sends is tested against a receiver of OpenTelemetry's own messages, CloudWatch against an emulator that returns the
values, and Prometheus against a real server. W&B is tested with its own client in offline mode, MLflow with its own
client and a store in a folder.
"""


def page() -> str:
    places = ["| where | how | the name of `step_s`, `auc`, `gpu_power_w` |", "|---|---|---|",
              *(f"| {where} | {how} | {names} |" for where, how, names in PLACES)]
    lines = [HEAD.replace("{places}", "\n".join(places) + "\n")]
    for group in GROUPS:
        lines += [f"### {group}", "", "| name | unit | meaning | labels | in events | Prometheus |",
                  "|---|---|---|---|---|---|",
                  *(_line(one) for one in METRICS if one.group == group), ""]
    text = "\n".join(lines).rstrip() + "\n" + PROMETHEUS
    text += "\n".join(
        f"| {one.name} | `{_cell(one.expression)}` | {one.minutes} min | {_cell(one.what)} |" for one in alerts())
    return text + "\n" + CLOUDS


def _line(one: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    found = ", ".join(_where(path) for path in one.paths)
    return f"| `{one.name}` | {one.unit} | {_cell(one.meaning)} | {labels} | {found} | `{prometheus_name(one)}` |"


def _where(path: str) -> str:
    if path.startswith("#"):
        return f"how many `{path[1:]}`"
    return "any" if path.startswith("@") else f"`{path}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
