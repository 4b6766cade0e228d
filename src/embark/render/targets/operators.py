"""The pinned versions of what a cluster must run before it knows an object of a target."""

JOBSET_VERSION = "v0.12.0"
KUEUE_VERSION = "v0.19.2"
TRAINER_VERSION = "v2.3.0"
TRAINING_OPERATOR_VERSION = "v1.9.4"
KUBERAY_VERSION = "1.7.0"
VOLCANO_VERSION = "v1.13.0"
