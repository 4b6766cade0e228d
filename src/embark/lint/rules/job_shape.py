"""EMB1xx, second half: does the Job survive failures, evictions and its own end?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from embark.lint.edit import add_key, replace_within, set_scalar
from embark.lint.job import TrainingJob
from embark.lint.read import PythonFile
from embark.lint.rule import Hit, Rules, World

RULES = Rules()
JOB = "https://kubernetes.io/docs/concepts/workloads/controllers/job/"
FAILURE = "https://kubernetes.io/docs/tasks/job/pod-failure-policy/"
GRACE_S = {
    "aws": (120, "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"),
    "azure": (30, "https://learn.microsoft.com/azure/virtual-machines/spot-vms"),
    "gcp": (15, "https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms"),
}
"""What a spot machine gives a pod before it is gone."""
DEFAULT_GRACE_S = 30
EXIT_PREEMPTED = 75


@RULES.add("EMB120", "backoff-by-default", "warning",
           "With the default of 6 a Job that cannot start is tried seven times before it says so.", JOB)
def backoff_by_default(world: World) -> Iterator[Hit]:
    for job in _plain(world):
        if not job.spec["backoffLimit"]:
            yield Hit(job.document.place, "backoffLimit is not set: 6 retries, and each counts a preemption",
                      "backoffLimit: 3, with a podFailurePolicy that does not count preemptions")


@RULES.add("EMB121", "no-failure-policy", "warning",
           "Without a podFailurePolicy an eviction counts as a failure, and a wrong spec is retried to the end.",
           FAILURE)
def no_failure_policy(world: World) -> Iterator[Hit]:
    for job in _plain(world):
        rules = job.spec.at("podFailurePolicy.rules")
        told = [condition["type"].text for rule in rules for condition in rule["onPodConditions"]]
        if "DisruptionTarget" not in told:
            yield Hit(job.document.place, "a preempted pod counts against backoffLimit",
                      "podFailurePolicy: Ignore on DisruptionTarget and on exit code 75, FailJob on 64")


@RULES.add("EMB122", "failure-policy-needs-never", "error",
           "The API server refuses a podFailurePolicy whose pods have another restartPolicy than Never.", FAILURE,
           can_fix=True)
def failure_policy_needs_never(world: World) -> Iterator[Hit]:
    for job in _plain(world):
        policy = job.pod.spec["restartPolicy"]
        if job.spec["podFailurePolicy"] and policy.text != "Never" and policy.place is not None:
            yield Hit(policy.place, f"podFailurePolicy with restartPolicy: {policy.text} is refused",
                      "restartPolicy: Never", set_scalar(policy, "Never"))


@RULES.add("EMB123", "no-restart-policy", "error",
           "A Job's pods must say restartPolicy: Never or OnFailure; the default, Always, is refused.", JOB,
           can_fix=True)
def no_restart_policy(world: World) -> Iterator[Hit]:
    for pod in world.pods:
        if pod.document.kind not in ("Job", "CronJob", "JobSet"):
            continue
        policy = pod.spec["restartPolicy"]
        if policy.text not in ("Never", "OnFailure") and pod.spec.place is not None:
            if pod.document.kind == "JobSet" and not policy:
                continue  # JobSet's webhook fills it in
            yield Hit(policy.place or pod.place, f"restartPolicy is {policy.text or 'not set'}", "restartPolicy: Never",
                      set_scalar(policy, "Never") if policy else add_key(pod.spec, "restartPolicy: Never"))


@RULES.add("EMB124", "replaced-while-terminating", "warning",
           "A pod is replaced while the old one still holds its GPUs; `podReplacementPolicy: Failed` waits.",
           JOB + "#pod-replacement-policy", can_fix=True)
def replaced_while_terminating(world: World) -> Iterator[Hit]:
    for job in _plain(world):
        policy = job.spec["podReplacementPolicy"]
        # With a podFailurePolicy, Failed is the default and the only value allowed.
        if policy.text != "Failed" and not job.spec["podFailurePolicy"]:
            yield Hit(policy.place or job.document.place, "a new pod starts beside the one that is being stopped",
                      "podReplacementPolicy: Failed",
                      set_scalar(policy, "Failed") if policy else add_key(job.spec, "podReplacementPolicy: Failed"))


@RULES.add("EMB125", "never-cleaned-up", "warning",
           "A finished Job and its pods stay for good, and the same name cannot be applied again.",
           "https://kubernetes.io/docs/concepts/workloads/controllers/ttlafterfinished/", can_fix=True)
def never_cleaned_up(world: World) -> Iterator[Hit]:
    for job in _plain(world):
        if job.kind == "Job" and not job.spec["ttlSecondsAfterFinished"]:
            yield Hit(job.document.place, "nothing removes the Job once it is done", "ttlSecondsAfterFinished: 86400",
                      add_key(job.spec, "ttlSecondsAfterFinished: 86400"))


@RULES.add("EMB126", "stop-counts-as-success", "error",
           "A SIGTERM handler that exits with 0 tells the Job that this index is done: it completes untrained.", JOB,
           can_fix=True)
def stop_counts_as_success(world: World) -> Iterator[Hit]:
    fix = f"save, then exit with {EXIT_PREEMPTED}, which the podFailurePolicy ignores"
    for file in world.files.pythons:
        for function, call in _handlers_that_succeed(file):
            place = file.place(call)
            edits = replace_within(place, "(0)", f"({EXIT_PREEMPTED})") if place.text == "sys.exit(0)" else ()
            yield Hit(place, f"{function} handles SIGTERM and ends with {place.text}: the Job counts it as done", fix,
                      edits)
    for command in world.commands:
        if command.name == "trap" and len(command.words) > 2 and re.search(r"\bexit\s*(0\b|$|;)", command.argv[1]) \
                and {"TERM", "SIGTERM", "15"} & set(command.argv[2:]):
            yield Hit(command.place, "the trap ends the script with 0 on SIGTERM: the Job counts it as done", fix)


@RULES.add("EMB127", "grace-by-default", "warning",
           "A pod that is stopped is killed after 30 s, however long its last save takes.",
           "https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination", can_fix=True)
def grace_by_default(world: World) -> Iterator[Hit]:
    for job in world.jobs:
        node = job.pod.spec["terminationGracePeriodSeconds"]
        if not job.pod.is_whole or not job.gpus or (job.is_spot and job.cloud in ("gcp", "azure") and node):
            continue
        if not node or (node.whole or DEFAULT_GRACE_S) < DEFAULT_GRACE_S:
            have = f"{node.text} s" if node else f"the default of {DEFAULT_GRACE_S} s"
            longest = GRACE_S[job.cloud][0] if job.cloud and job.is_spot else 120
            setting = f"terminationGracePeriodSeconds: {longest}"
            yield Hit(node.place or job.place, f"a last checkpoint has {have}", setting,
                      set_scalar(node, str(longest)) if node else add_key(job.pod.spec, setting))


@RULES.add("EMB128", "grace-beyond-the-cloud", "warning",
           "A spot machine is gone sooner than the grace period ends: the save is cut off.", GRACE_S["gcp"][1],
           can_fix=True)
def grace_beyond_the_cloud(world: World) -> Iterator[Hit]:
    for job in world.jobs:
        node = job.pod.spec["terminationGracePeriodSeconds"]
        if not job.is_spot or job.cloud not in GRACE_S:
            continue
        longest, _ = GRACE_S[job.cloud]
        asked = node.whole if node else DEFAULT_GRACE_S
        if asked is not None and asked > longest:
            said = f"{asked} s" if node else f"the default of {asked} s"
            yield Hit(node.place or job.place, f"the pod counts on {said} and a spot machine of {job.cloud} gives "
                      f"{longest} s", f"terminationGracePeriodSeconds: {longest}, and save often enough",
                      set_scalar(node, str(longest)) if node else
                      add_key(job.pod.spec, f"terminationGracePeriodSeconds: {longest}"))


@RULES.add("EMB129", "no-gang", "warning",
           "Pods start one by one as room comes free: half a job holds its GPUs and waits for the other half.",
           "https://kueue.sigs.k8s.io/docs/overview/")
def no_gang(world: World) -> Iterator[Hit]:
    for job in world.jobs:
        if job.is_distributed and job.gpus and not _is_gang(job):
            yield Hit(job.document.place, f"{job.num_nodes} pods are not scheduled together",
                      "label kueue.x-k8s.io/queue-name: QUEUE on the object, with Kueue in the cluster")


@RULES.add("EMB130", "queue-not-given", "warning",
           "A Job whose queue does not exist stays suspended without a word.",
           "https://kueue.sigs.k8s.io/docs/tasks/run/jobs/")
def queue_not_given(world: World) -> Iterator[Hit]:
    queues, clusters = world.of_kind("LocalQueue"), world.of_kind("ClusterQueue")
    for job in world.jobs:
        node = job.document.root.at("metadata.labels")["kueue.x-k8s.io/queue-name"]
        names = [queue.name for queue in queues if queue.namespace == job.document.namespace]
        if queues and node.place is not None and node.text not in names:
            yield Hit(node.place, f"LocalQueue {node.text} in {job.document.namespace} is not among the files given",
                      f"one of: {', '.join(sorted({queue.name for queue in queues}))}, in the Job's namespace")
    for queue in queues:
        node = queue.root.at("spec.clusterQueue")
        if clusters and node.place is not None and node.text not in [one.name for one in clusters]:
            yield Hit(node.place, f"ClusterQueue {node.text} is not among the files given",
                      f"one of: {', '.join(sorted(one.name for one in clusters))}")
    flavors = [one.name for one in world.of_kind("ResourceFlavor")]
    for cluster in clusters:
        for group in cluster.root.at("spec.resourceGroups"):
            for flavor in group["flavors"]:
                if flavors and flavor["name"].text not in flavors and flavor["name"].place is not None:
                    yield Hit(flavor["name"].place, f"ResourceFlavor {flavor['name'].text} is not among the files "
                              "given", f"one of: {', '.join(sorted(flavors))}")


@RULES.add("EMB131", "old-kueue", "warning", "Kueue serves v1beta2; older versions are on their way out.",
           "https://kueue.sigs.k8s.io/docs/reference/kueue.v1beta2/", can_fix=True)
def old_kueue(world: World) -> Iterator[Hit]:
    for document in world.documents:
        group, _, version = document.api.partition("/")
        node = document.root["apiVersion"]
        if group == "kueue.x-k8s.io" and version in ("v1beta1", "v1alpha1", "v1alpha2") and node.place is not None:
            yield Hit(node.place, f"{document.kind} is written for {version}", "apiVersion: kueue.x-k8s.io/v1beta2",
                      set_scalar(node, "kueue.x-k8s.io/v1beta2") if version == "v1beta1" else ())


@RULES.add("EMB132", "logs-of-one-pod", "warning",
           "`kubectl logs job/NAME` follows one pod of many; the rank that failed is another.",
           "https://kubernetes.io/docs/reference/kubectl/generated/kubectl_logs/")
def logs_of_one_pod(world: World) -> Iterator[Hit]:
    for command in world.commands:
        name = next((word for word in command.argv if re.match(r"jobs?(\.batch)?/", word)), "")
        if command.begins("kubectl", "logs") and name and not command.has("--all-pods"):
            job = name.partition("/")[2]
            yield Hit(command.place, f"this follows one pod of {name}",
                      f"kubectl logs -f -l batch.kubernetes.io/job-name={job} --prefix --max-log-requests=64")


def _plain(world: World) -> Iterator[TrainingJob]:
    """Kubernetes Jobs by themselves; a JobSet's have policies of their own."""
    for job in world.jobs:
        if job.kind in ("Job", "CronJob"):
            yield job


def _is_gang(job: TrainingJob) -> bool:
    root = job.document.root
    labels, annotations = root.at("metadata.labels"), root.at("metadata.annotations")
    return bool(
        labels["kueue.x-k8s.io/queue-name"] or annotations["kueue.x-k8s.io/queue-name"]
        or root.at("spec.runPolicy.schedulingPolicy") or job.pod.spec["schedulingGroup"]
        or job.pod.spec["schedulerName"].text in ("volcano", "scheduler-plugins-scheduler", "kai-scheduler")
        or any("pod-group" in name or "group-name" in name for name in (*job.pod.labels, *job.pod.annotations))
        or job.document.api.startswith("batch.volcano.sh")
    )


def _handlers_that_succeed(file: PythonFile) -> Iterator[tuple[str, ast.Call]]:
    handlers = {
        ast.unparse(call.args[1]) for call in file.calls("signal.signal")
        if len(call.args) > 1 and ast.unparse(call.args[0]).endswith("SIGTERM")
    }
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef) and node.name in {name.rpartition(".")[2] for name in handlers}:
            for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
                name = ast.unparse(call.func)
                is_zero = not call.args or (isinstance(call.args[0], ast.Constant) and call.args[0].value in (0, None))
                if name in ("sys.exit", "exit", "quit", "os._exit") and is_zero:
                    yield node.name, call


