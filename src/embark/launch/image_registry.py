"""The registry that an image's name leads to: how to log in there, and how its repository is made."""

import re
from dataclasses import dataclass

from embark.render.targets.kubernetes import PLACEHOLDER_REGISTRY

_ECR = re.compile(r"\d{12}\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?")
_ACR = re.compile(r"(?P<name>[a-z0-9]+)\.azurecr\.io")
_ARTIFACT = re.compile(r"(?P<location>[a-z0-9-]+)-docker\.pkg\.dev")
EXAMPLES = {
    "aws": "123456789012.dkr.ecr.REGION.amazonaws.com/embark:1",
    "azure": "yourregistry.azurecr.io/embark:1",
    "gcp": "REGION-docker.pkg.dev/your-project/embark/embark:1",
}
"""By cloud: an image's name in its own registry."""
_TOKEN_USER = "00000000-0000-0000-0000-000000000000"  # Whom Azure's tokens are for.


@dataclass(frozen=True, slots=True)
class ImageName:
    """`HOST/REPOSITORY:TAG@DIGEST` in its parts."""

    host: str  # Empty where the name has no registry.
    repository: str
    tag: str
    digest: str

    @classmethod
    def parse(cls, text: str) -> "ImageName":
        rest, _, digest = text.partition("@")
        first, slash, below = rest.partition("/")
        host, path = (first, below) if slash and (re.search(r"[.:]", first) or first == "localhost") else ("", rest)
        repository, _, tag = path.partition(":")
        return cls(host, repository, tag, digest)

    def __str__(self) -> str:
        name = f"{self.host}/{self.repository}" if self.host else self.repository
        return name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")

    @property
    def can_be_pushed(self) -> bool:
        """To a registry that is somebody's; a name with one slash and no host is Docker Hub's."""
        return "/" in str(self) and self.host not in ("localhost", PLACEHOLDER_REGISTRY.rstrip("/"))

    def login_command(self, builder: str) -> str:
        """A shell's line."""
        to = f"{builder} login --username {{}} --password-stdin {self.host}"
        if found := _ECR.fullmatch(self.host):
            return f"aws ecr get-login-password --region {found['region']} | {to.format('AWS')}"
        if found := _ACR.fullmatch(self.host):
            login = f"az acr login --name {found['name']}"
            return login if builder == "docker" else (
                f"{login} --expose-token --query accessToken --output tsv | {to.format(_TOKEN_USER)}")
        if _ARTIFACT.fullmatch(self.host):
            return f"gcloud auth configure-docker {self.host}" if builder == "docker" else (
                f"gcloud auth print-access-token | {to.format('oauth2accesstoken')}")
        return f"{builder} login {self.host}".rstrip()

    @property
    def create_command(self) -> str:
        """A shell's line that makes the repository; empty where the first push does."""
        if found := _ECR.fullmatch(self.host):
            return f"aws ecr create-repository --repository-name {self.repository} --region {found['region']}"
        project, _, rest = self.repository.partition("/")
        if (found := _ARTIFACT.fullmatch(self.host)) and rest:
            return (f"gcloud artifacts repositories create {rest.partition('/')[0]} --repository-format=docker "
                    f"--location={found['location']} --project={project}")
        return ""
