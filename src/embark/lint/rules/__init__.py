"""All rules, in the order of their codes."""

from __future__ import annotations

from embark.lint.rule import Rule
from embark.lint.rules import aws, azure, code, files, gcp, images, job_shape, kubeflow, pods, rendezvous, vertex

ROOMS = {
    "Files": files, "Rendezvous": rendezvous, "Jobs": job_shape, "Pods": pods, "Kubeflow and TorchX": kubeflow,
    "Images and packages": images, "AWS": aws, "Azure": azure, "Google Cloud": gcp, "Vertex AI": vertex,
    "Training code and TPU": code,
}
ALL_RULES: tuple[Rule, ...] = tuple(sorted((rule for room in ROOMS.values() for rule in room.RULES),
                                           key=lambda rule: rule.code))
