"""Registries of the clouds: how a machine of the run logs in to the one that has its image."""

import re

from embark.render.shell_text import quote

ECR = re.compile(r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com/(?P<name>[^:@]+)")


def login_text(image: str) -> str:
    """Shell text that logs docker in, by the machine's own identity; empty for a registry that needs no login."""
    if found := ECR.match(image):
        return (f"aws ecr get-login-password --region {quote(found['region'])} |\n"
                f"  docker login --username AWS --password-stdin {quote(image.partition('/')[0])}\n")
    host = image.partition("/")[0]
    if host.endswith("-docker.pkg.dev"):
        return f"gcloud auth configure-docker {quote(host)} --quiet\n"
    return ""
