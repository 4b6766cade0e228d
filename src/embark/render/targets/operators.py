"""What a cluster must run before it knows an object of a target: the commands that install it, at pinned versions."""

from __future__ import annotations

from embark.render.shell_text import run

JOBSET_VERSION = "v0.12.0"
KUEUE_VERSION = "v0.19.2"
TRAINER_VERSION = "v2.3.0"
TRAINING_OPERATOR_VERSION = "v1.9.4"
KUBERAY_VERSION = "1.7.0"


def install_operator(target: str) -> list[str]:
    """Shell text; empty for targets that Kubernetes itself knows."""
    steps = {
        "jobset": [_apply(f"https://github.com/kubernetes-sigs/jobset/releases/download/{JOBSET_VERSION}/manifests.yaml")],
        "trainjob": [
            _apply_folder(f"https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref={TRAINER_VERSION}"),
            run("kubectl", "wait", "deployment", "--all", "--namespace", "kubeflow-system",
                "--for=condition=Available", "--timeout=300s"),
            _apply_folder(f"https://github.com/kubeflow/trainer.git/manifests/overlays/runtimes?ref={TRAINER_VERSION}"),
        ],
        "pytorchjob": [_apply_folder("https://github.com/kubeflow/training-operator.git/manifests/overlays/standalone"
                                     f"?ref={TRAINING_OPERATOR_VERSION}")],
        "ray": [
            run("helm", "repo", "add", "--force-update", "kuberay", "https://ray-project.github.io/kuberay-helm/"),
            run("helm", "upgrade", "kuberay-operator", "kuberay/kuberay-operator", "--install",
                "--version", KUBERAY_VERSION, "--namespace", "kuberay-system", "--create-namespace"),
        ],
    }.get(target, [])
    return ["\n".join([f"# What makes the cluster know this run's kind of object: {target}.", *steps])] if steps else []


def install_kueue() -> list[str]:
    """Queues: a job starts when all its machines are there, or waits and says so."""
    return [
        _apply(f"https://github.com/kubernetes-sigs/kueue/releases/download/{KUEUE_VERSION}/manifests.yaml"),
        # Its objects are checked by a webhook of its own, which must stand first.
        run("kubectl", "wait", "deployment", "--all", "--namespace", "kueue-system", "--for=condition=Available",
            "--timeout=300s"),
    ]


def _apply(url: str) -> str:
    # Server side: these objects are too large for the annotation that the other way leaves on them.
    return run("kubectl", "apply", "--server-side", "--force-conflicts", "-f", url)


def _apply_folder(url: str) -> str:
    return run("kubectl", "apply", "--server-side", "--force-conflicts", "-k", url)
