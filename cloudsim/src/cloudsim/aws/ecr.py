"""Rules of ECR: who may push and pull which image."""

import base64
import re
from datetime import UTC, datetime
from typing import Any

from cloudsim.aws.account import NUMBER, AwsAccount, facts
from cloudsim.aws.api import Parameters, operation
from cloudsim.aws.iam import denial

HOST = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com")
PULL_ACTIONS = ("ecr:GetAuthorizationToken", "ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer",
                "ecr:BatchGetImage")


@operation("ecr.GetAuthorizationToken")
def get_authorization_token(account: AwsAccount, region: str, given: Parameters) -> dict[str, Any]:
    """Return a token of one region. moto's is valid in all of them, a real one is not."""
    token = base64.b64encode(f"AWS:{_password(region)}".encode()).decode()
    return {"authorizationData": [{"authorizationToken": token, "expiresAt": datetime.now(UTC),
                                   "proxyEndpoint": f"https://{NUMBER}.dkr.ecr.{region}.amazonaws.com"}]}


def _password(region: str) -> str:
    return f"{NUMBER}-{region}-token"


def pull_denial(documents: list[str], who: str, repository: str = "*") -> str:
    """Return why policies do not let someone pull the images of a repository, or an empty text."""
    wanted = ((action, "*" if action.endswith("Token") else repository) for action in PULL_ACTIONS)
    return next((why for one in wanted if (why := denial(documents, who, *one))), "")


class EcrRegistry:
    """The account's registries, one in each region."""

    def __init__(self, account: AwsAccount) -> None:
        self.account = account

    def login_error(self, host: str, user: str, password: str) -> str:
        found = HOST.fullmatch(host)
        if not found:
            return f"Error response from daemon: Get \"https://{host}/v2/\": dial tcp: lookup {host}: no such host"
        if found[1] != NUMBER or user != "AWS" or password.strip() != _password(found[2]):
            return (f"Error response from daemon: login attempt to https://{host}/v2/ failed with status: "
                    "400 Bad Request")
        return ""

    def push_error(self, image: str, logins: set[str]) -> str:
        host, _, path = image.partition("/")
        if host not in logins:
            return "no basic auth credentials"
        return self.repository_error(host, path)

    def repository_error(self, host: str, path: str) -> str:
        found = HOST.fullmatch(host)
        if not found:
            return f"failed to do request: dial tcp: lookup {host}: no such host"
        name = path.partition("@")[0].partition(":")[0]
        if found[1] != NUMBER or name not in self.account.backends("ecr")[found[2]].repositories:
            return (f"name unknown: The repository with name '{name}' does not exist in the registry with id "
                    f"'{found[1]}'")
        return ""

    def image_error(self, image: str) -> str:
        """Return why nobody can pull an image, whatever rights they have, or an empty text."""
        host, mark, path = image.partition("/")
        if HOST.fullmatch(host):
            missing = self.repository_error(host, path)
            if not missing and not self.account.images.is_pushed(image):
                missing = f"{image}: not found"
            return missing
        if not mark or not {".", ":"} & set(host):
            is_there = image.startswith(tuple(facts()["registries"]["hub"]))
            return "" if is_there else (f"pull access denied for {image.partition(':')[0]}, repository does not exist "
                                        "or may require 'docker login'")
        if image.startswith(tuple(facts()["registries"]["public"])):
            return ""
        return f"failed to do request: Head \"https://{host}/v2/\": dial tcp: lookup {host}: no such host"
