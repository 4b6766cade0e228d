"""Registries of the clouds: how a machine of the run logs in to the one that has its image."""

import re

from embark.render.shell_text import quote

ACR = re.compile(r"(?P<registry>[a-z0-9]+)\.azurecr\.io/")
TOKEN = ("http://169.254.169.254/metadata/identity/oauth2/token?api-version=2018-02-01"
         "&resource=https%3A%2F%2Fmanagement.azure.com%2F")
NO_USER = "00000000-0000-0000-0000-000000000000"  # Azure's name for whoever comes with a token.
ECR = re.compile(r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com/(?P<name>[^:@]+)")


def login_text(image: str) -> str:
    """Shell text that logs docker in, by the machine's own identity; empty for a registry that needs no login."""
    if found := ECR.match(image):
        return (f"aws ecr get-login-password --region {quote(found['region'])} |\n"
                f"  docker login --username AWS --password-stdin {quote(image.partition('/')[0])}\n")
    host = image.partition("/")[0]
    if host.endswith("-docker.pkg.dev"):
        return f"gcloud auth configure-docker {quote(host)} --quiet\n"
    if ACR.match(image):
        return (f"curl -fsS --header Metadata:true '{TOKEN}' |\n"
                "  sed -E 's/.*\"access_token\":\"([^\"]+)\".*/\\1/' |\n"
                f"  curl -fsS --data grant_type=access_token --data service={host} --data-urlencode access_token@- "
                f"https://{host}/oauth2/exchange |\n"
                "  sed -E 's/.*\"refresh_token\":\"([^\"]+)\".*/\\1/' |\n"
                f"  docker login --username {NO_USER} --password-stdin {host}\n")
    return ""


def acr_name(image: str) -> str:
    """The registry of Azure that has an image; empty where it is another's."""
    found = ACR.match(image)
    return found["registry"] if found else ""
