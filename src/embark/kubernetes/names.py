"""Names that Kubernetes and the clouds accept, and the labels and annotations that other programs define."""

import hashlib
import re

MAX_LABEL = 63  # Characters of a DNS label, which the name of a pod's host and of a Service is.
MAX_RUN_LABEL = 40  # Objects of a run add `-worker-0`, `-nats` and the like to its label.
INSTANCE = "app.kubernetes.io/instance"  # Every pod of a run has it, with the name of the run's object.
COMPONENT = "app.kubernetes.io/component"
CONFIG_CHECKSUM = "embark/config-checksum"  # An annotation of pods, of the ConfigMap that they read.
JOB_NAME = "batch.kubernetes.io/job-name"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
REPLICA_INDEX = "training.kubeflow.org/replica-index"
INDEX_LABELS = (COMPLETION_INDEX, REPLICA_INDEX, "torchx.pytorch.org/replica-id")
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
GKE_ACCELERATOR = "cloud.google.com/gke-accelerator"
SPOT_LABELS = {
    "aws": (("eks.amazonaws.com/capacityType", "SPOT"), ("karpenter.sh/capacity-type", "spot")),
    "azure": (("kubernetes.azure.com/scalesetpriority", "spot"),),
    "gcp": (("cloud.google.com/gke-spot", "true"),)
}
"""Labels of spot nodes by cloud; the first is that of the cloud's own node pools."""
SPOT_TAINTS = ("azure", "gcp")  # Clouds whose spot nodes have their label as a taint, too.
IDENTITY_ANNOTATIONS = {
    "aws": "eks.amazonaws.com/role-arn",
    "azure": "azure.workload.identity/client-id",
    "gcp": "iam.gke.io/gcp-service-account",
    "": ""  # A cluster of no known cloud.
}


def object_label(name: str) -> str:
    """Replace all but lower case letters and digits by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def dns_label(name: str) -> str:
    """Return a label that begins with a letter, of at most `MAX_RUN_LABEL` characters.

    A name that is cut ends with a hash of the whole, so that two long names do not become one.
    """
    label = object_label(name)
    label = label if label[:1].isalpha() else f"run-{label}".rstrip("-")
    if len(label) <= MAX_RUN_LABEL:
        return label
    return f"{label[:MAX_RUN_LABEL - 7].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
