"""One script a cloud, from nothing to a trained model and back: tools, login, quota, cluster, storage, job, logs."""

from __future__ import annotations

from collections.abc import Callable

from embark.render.clouds.azure.cluster import pool_name
from embark.render.clouds.azure.volumes import storage_account_setting
from embark.render.clouds.gcp.cluster import pool_names, project_setting
from embark.render.file import File
from embark.render.job import EXITS, Job
from embark.render.location import site_of
from embark.render.pod import CONTAINER
from embark.render.shell_text import PRELUDE, Shell, command, function, quote, run, script, setting, variable
from embark.render.targets.operators import install_kueue

NAMES = {"aws": "train_dlrm_aws.sh", "azure": "train_dlrm_azure.sh", "gcp": "train_dlrm_gcp.sh"}
TOOLS = {
    "aws": {"aws": "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
            "eksctl": "https://eksctl.io/installation/"},
    "azure": {"az": "https://learn.microsoft.com/cli/azure/install-azure-cli"},
    "gcp": {"gcloud": "https://cloud.google.com/sdk/docs/install"},
}
COMMON_TOOLS = {"kubectl": "https://kubernetes.io/docs/tasks/tools/", "helm": "https://helm.sh/docs/intro/install/"}
CLUSTER_SCRIPTS = {"aws": "eks_cluster.sh", "azure": "aks_cluster.sh", "gcp": "gke_cluster.sh"}
MANIFESTS = {
    "job": ("kubernetes_job.yaml", "job.batch"),
    "jobset": ("jobset.yaml", "jobset.jobset.x-k8s.io"),
    "trainjob": ("trainjob.yaml", "trainjob.trainer.kubeflow.org"),
    "pytorchjob": ("pytorchjob.yaml", "pytorchjob.kubeflow.org"),
    "ray": ("rayjob.yaml", "rayjob.ray.io"),
}
"""The file of each target, and what kubectl calls its object."""
PLACEHOLDER_REGISTRY = "registry.example.com/"
USAGE = "[--dry-run] [--yes] [run | check | status | logs | stop | clean | destroy]"


def render_launch_script(job: Job) -> list[File]:
    """`train_dlrm_CLOUD.sh`, for targets of Kubernetes."""
    return [File(NAMES[job.cloud], _script(job), is_executable=True)] if job.spec.place.target in MANIFESTS else []


def _script(job: Job) -> str:
    site = site_of(job)
    about = (f"Trains {job.spec.name} on {job.num_nodes} x {job.machine.name} of {job.cloud}: looks at tools, login "
             "and quota, makes what is missing, hands the job over and follows it. Safe to repeat: what is there is "
             "left as it is. --dry-run says every command that would change something, and runs none.")
    cloud: dict[str, Callable[[Job], tuple[list[str], str, str, str]]] = {"aws": _aws, "azure": _azure, "gcp": _gcp}
    settings, login, rest, delete = cloud[job.cloud](job)
    steps = [
        function("check", "Tools, login, image and quota: all that can be known before anything costs money.",
                 _check(job, login)),
        function("confirm", "Says what it will cost, and asks.", _confirm(job)),
        function("train", "Cluster, storage, job, and its log until it ends.", _train(job)),
        function("status", "The job and its pods, and why one waits.", _status(job)),
        function("logs", "Every pod's log, each line with its pod's name.", _logs(job)),
        function("state", "How the job stands: Complete, Failed, or nothing yet.", _state(job)),
        function("follow", "Logs until the job has ended: pods that are replaced are followed too.", _follow(job)),
        function("stop", "Takes the job away; machines, data and checkpoints stay.",
                 run("kubectl", "delete", _kind(job), job.name, "--namespace", job.namespace, "--ignore-not-found")),
        function("clean", "Takes the job away and lets the GPU machines go, which are nearly all of the bill.",
                 "stop", rest),
        function("destroy", "Deletes the whole cluster. The run's files stay in their bucket.",
                 _ask("Delete the cluster?"), delete),
    ]
    return script(about, "\n".join([setting("CLUSTER", site.cluster), *settings]), PRELUDE, "YES=${YES:-0}",
                  'cd "$(dirname "$0")"', *steps, _MAIN)


_MAIN = f"""\
VERB=run
for word in "$@"; do
  case $word in
    --dry-run) DRY_RUN=1 ;;
    --yes) YES=1 ;;
    run | check | status | logs | stop | clean | destroy) VERB=$word ;;
    *)
      printf 'usage: %s {USAGE}\\n' "$0" >&2
      exit 64
      ;;
  esac
done
export DRY_RUN
case $VERB in
  run) train ;;
  *) "$VERB" ;;
esac"""


def _kind(job: Job) -> str:
    return MANIFESTS[job.spec.place.target][1]


def _check(job: Job, login: str) -> str:
    tools = {**TOOLS[job.cloud], **COMMON_TOOLS}
    looks = "\n".join(
        f"if ! command -v {tool} >/dev/null; then\n  printf '%s\\n' {quote(f'{tool} is missing: {url}')} >&2\n"
        "  missing=1\nfi"
        for tool, url in tools.items())
    image = "# The image is named in the spec."
    if "/" not in job.image or job.image.startswith(PLACEHOLDER_REGISTRY):
        said = ("The image has no registry yet. Build it with the Dockerfile, push it, and render again with its name: "
                "embark render run.toml --set place.image=REGISTRY/embark:TAG --out .")
        image = f"printf '%s\\n' {quote(said)} >&2\nif [ \"$DRY_RUN\" = 0 ]; then exit 64; fi"
    return f"""\
local missing=0
{looks}
if [ "$DRY_RUN" = 0 ] && [ "$missing" = 1 ]; then exit 64; fi
if [ "$DRY_RUN" = 0 ]; then
  {login}
  ./money.sh quota
fi
{image}"""


def _confirm(job: Job) -> str:
    rate, origin = job.usd_per_hour, job.price.origin
    way = "spot" if job.spec.place.spot else "on demand"
    cost = "at a price that the catalog does not know"
    if rate is not None and origin is not None:
        cost = f"{way}: about {rate:,.2f} USD an hour ({origin.date}), besides the cluster and storage"
    said = f"{job.num_nodes} x {job.machine.name} in {site_of(job).region}, {cost}."
    return f"printf '%s\\n' {quote(said)}\n{_ask('Go on?')}"


def _train(job: Job) -> str:
    steps = ["check", "confirm", f"./{CLUSTER_SCRIPTS[job.cloud]}", "./storage.sh"]
    if job.spec.place.volume:
        steps += [
            run("kubectl", "apply", "-f", "data_copy_job.yaml"),
            run("kubectl", "wait", f"job.batch/{job.name}-data-copy", "--namespace", job.namespace,
                "--for=condition=Complete", "--timeout=24h"),
        ]
    if job.spec.place.queue:
        steps += [*install_kueue(), run("kubectl", "apply", "-f", "kueue.yaml")]
    steps += [run("kubectl", "apply", "-f", MANIFESTS[job.spec.place.target][0]),
              'if [ "$DRY_RUN" = 0 ]; then follow; fi']
    return "\n".join(steps)


def _selector(job: Job) -> tuple[str, str]:
    return "--selector", f"app.kubernetes.io/instance={job.name}"


def _status(job: Job) -> str:
    namespace = ("--namespace", job.namespace)
    return "\n".join([
        command("kubectl", "get", _kind(job), job.name, *namespace),
        command("kubectl", "get", "pods", *namespace, *_selector(job), "--output", "wide"),
        command("kubectl", "get", "events", *namespace, "--field-selector", "type=Warning", "--sort-by",
                ".lastTimestamp"),
    ])


def _logs(job: Job) -> str:
    # Ray's and Kubeflow's pods have containers of other names.
    container = ("--container", CONTAINER) if job.spec.place.target in ("job", "jobset") else ("--all-containers",)
    return command("kubectl", "logs", "--namespace", job.namespace, *_selector(job), *container, "--follow",
                   "--prefix", "--max-log-requests", str(max(10, 4 * job.num_nodes)), Shell('"$@"'))


def _state(job: Job) -> str:
    path = "{.status.jobStatus}" if job.spec.place.target == "ray" else '{.status.conditions[?(@.status=="True")].type}'
    return command("kubectl", "get", _kind(job), job.name, "--namespace", job.namespace, "--output",
                   f"jsonpath={path}")


def _follow(job: Job) -> str:
    fault = next(exit.code for exit in EXITS if exit.must_retry)
    return f"""\
local now since=--tail=-1
while true; do
  now=$(state || true)
  case $now in
    *Complete* | *Succeeded* | SUCCEEDED) printf 'done\\n'; return 0 ;;
    *Failed* | FAILED)
      status
      printf 'the job has failed: %s\\n' "$now" >&2
      exit {int(fault)}
      ;;
  esac
  # Fails while no pod runs yet, and ends when the pods that ran have ended.
  if logs "$since" 2>/dev/null; then since=--since=30s; else status; fi
  sleep 15
done"""


def _ask(question: str) -> str:
    return f"""\
if [ "$YES" = 0 ] && [ "$DRY_RUN" = 0 ]; then
  local answer
  read -r -p {quote(f"{question} [y/N] ")} answer
  case $answer in
    y | Y | yes) ;;
    *) exit 130 ;;
  esac
fi"""


def _aws(job: Job) -> tuple[list[str], str, str, str]:
    site = site_of(job)
    where = ("--region", variable("REGION"))
    return (
        [setting("REGION", site.region) + "\nexport CLUSTER REGION"],
        "aws sts get-caller-identity >/dev/null",
        run("eksctl", "scale", "nodegroup", "--cluster", variable("CLUSTER"), *where, "--name", site.pool,
            "--nodes", "0", "--nodes-min", "0"),
        run("eksctl", "delete", "cluster", "--name", variable("CLUSTER"), *where, "--disable-nodegroup-eviction"),
    )


def _azure(job: Job) -> tuple[list[str], str, str, str]:
    site = site_of(job)
    group = ("--resource-group", variable("RESOURCE_GROUP"))
    settings = [setting("RESOURCE_GROUP", site.cluster), setting("LOCATION", site.region)]
    exported = "CLUSTER RESOURCE_GROUP LOCATION"
    if job.spec.place.storage_account:
        settings.append(storage_account_setting(job))
        exported += " STORAGE_ACCOUNT"
    return (
        [*settings, f"export {exported}"],
        "az account show >/dev/null",
        run("az", "aks", "nodepool", "delete", *group, "--cluster-name", variable("CLUSTER"), "--name", pool_name(job)),
        run("az", "aks", "delete", *group, "--name", variable("CLUSTER"), "--yes"),
    )


def _gcp(job: Job) -> tuple[list[str], str, str, str]:
    site = site_of(job)
    where = (Shell('--location="$REGION"'), Shell('--project="$PROJECT"'))
    return (
        [project_setting(job), setting("REGION", site.region), setting("ZONE", site.zone),
         "export CLUSTER PROJECT REGION ZONE"],
        "gcloud auth print-access-token >/dev/null",
        "\n".join(run("gcloud", "container", "node-pools", "delete", pool, Shell('--cluster="$CLUSTER"'), *where,
                      "--quiet") for pool in pool_names(job)),
        run("gcloud", "container", "clusters", "delete", variable("CLUSTER"), *where, "--quiet"),
    )
