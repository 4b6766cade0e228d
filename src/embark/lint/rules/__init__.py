"""All rules, in the order of their codes."""

from __future__ import annotations

from embark.lint.rule import Rule
from embark.lint.rules import aws
from embark.lint.rules import azure
from embark.lint.rules import code
from embark.lint.rules import files
from embark.lint.rules import gcp
from embark.lint.rules import images
from embark.lint.rules import job_shape
from embark.lint.rules import kubeflow
from embark.lint.rules import pods
from embark.lint.rules import rendezvous
from embark.lint.rules import vertex

ROOMS = {
    "Files": files, "Rendezvous": rendezvous, "Jobs": job_shape, "Pods": pods, "Kubeflow and TorchX": kubeflow,
    "Images and packages": images, "AWS": aws, "Azure": azure, "Google Cloud": gcp, "Vertex AI": vertex,
    "Training code and TPU": code,
}
ALL_RULES: tuple[Rule, ...] = tuple(sorted((rule for room in ROOMS.values() for rule in room.RULES),
                                           key=lambda rule: rule.code))
