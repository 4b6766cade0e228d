"""How long a machine or a pod stays after its notice, and who says so."""

GRACES: dict[str, tuple[float, str]] = {
    "aws": (120, "docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html, 2026-11"),
    "azure": (30, "learn.microsoft.com/azure/virtual-machines/linux/scheduled-events: Preempt, 2026-11"),
    "gce": (30, "docs.cloud.google.com/compute/docs/instances/spot: unless set to 120 s, 2026-11"),
    "gke-spot": (15, "docs.cloud.google.com/kubernetes-engine/docs/concepts/spot-vms: user pods, 2026-11"),
    "kubernetes": (30, "Kubernetes 1.36 API, PodSpec.terminationGracePeriodSeconds: the default, 2026-11"),
}
"""Seconds, and the source."""
POD_GRACE_S = {"aws": GRACES["aws"][0], "azure": GRACES["azure"][0], "gcp": GRACES["gke-spot"][0]}
"""By cloud: of a pod on a spot machine that asks for all it can get."""
