"""Artifact Registry: repositories, docker logins, and who may pull an image."""


from cloudsim.gcp.admin import TOKEN
from cloudsim.gcp.project import Invocation, Project, facts
from cloudsim.state import Resource
from embark.values import JsonDict


def repository_path(project: Project, location: str, name: str) -> str:
    return f"{project.path}/locations/{location}/repositories/{name}"


def _create_repository(project: Project, command: Invocation) -> str:
    location, name = command.location("--location"), command.name("REPOSITORY")
    if location not in facts()["zones"] and location not in ("us", "europe", "asia"):
        command.fail(f"INVALID_ARGUMENT: Location {location} is not supported.")
    if project.resources.find("repository", f"{location}/{name}"):
        command.fail("ALREADY_EXISTS: the repository already exists")
    project.resources.add("repository", f"{location}/{name}", location=location,
                                  format=command.text("--repository-format").lower(), is_paid=True)
    return ""


def _repository(project: Project, command: Invocation) -> Resource:
    location, name = command.location("--location"), command.name("REPOSITORY")
    found = project.resources.find("repository", f"{location}/{name}")
    if found is None:
        command.fail(f'NOT_FOUND: Requested entity was not found. (repository "{name}" in {location})')
    return found


def _show_repository(project: Project, one: Resource) -> JsonDict:
    name = one.name.partition("/")[2]
    return {"name": repository_path(project, one.location, name), "format": str(one.attributes["format"]).upper()}


def _delete_repository(project: Project, command: Invocation) -> str:
    found = _repository(project, command)
    name = found.name.partition("/")[2]
    start = f"{found.location}-docker.pkg.dev/{project.id}/{name}/"
    images = project.account.images.pushed
    for image in [one for one in images if one.startswith(start)]:
        del images[image]
    project.resources.remove(*found.key)
    return ""


def _bind_repository(project: Project, command: Invocation) -> str:
    found = _repository(project, command)
    project.bind(command, repository_path(project, found.location, found.name.partition("/")[2]))
    return ""


def _configure_docker(project: Project, command: Invocation) -> str:
    for host in (command.name("REGISTRIES") or "gcr.io").split(","):
        if not host.endswith(("-docker.pkg.dev", "gcr.io")):
            continue  # gcloud warns and writes it nevertheless.
        project.account.images.logins.add(host)
    return ""


class ArtifactRegistry:
    """The repositories of a project as docker on the owner's machine sees them."""

    def __init__(self, project: Project) -> None:
        self._project = project

    def login_error(self, host: str, user: str, password: str) -> str:
        if not host.endswith("-docker.pkg.dev"):
            return f"Error response from daemon: Get \"https://{host}/v2/\": dial tcp: lookup {host}: no such host"
        is_token = user == "oauth2accesstoken" and password.strip() == TOKEN
        return "" if is_token else "Error response from daemon: Get \"https://" + host + "/v2/\": unauthorized"

    def push_error(self, image: str, logins: set[str]) -> str:
        host, _, rest = image.partition("/")
        problem = self.repository_error(image)
        if not host.endswith("-docker.pkg.dev"):
            return f"dial tcp: lookup {host}: no such host"
        if host not in logins:
            return ('denied: Unauthenticated request. Unauthenticated requests do not have permission '
                    f'"artifactregistry.repositories.uploadArtifacts" on resource "{rest.rpartition("/")[0]}" (or it '
                    "may not exist)")
        return problem

    def repository_error(self, image: str) -> str:
        """Return why a name leads to no repository of this project, or an empty text."""
        host, _, rest = image.partition("/")
        parts = rest.split("/")
        location = host.removesuffix("-docker.pkg.dev")
        if len(parts) < 3:
            return f'name invalid: Missing image name. Pushes should be of the form docker push HOST-NAME/PROJECT-ID/' \
                   f'REPOSITORY/IMAGE, and this is {image}'
        if parts[0] != self._project.id:
            return f'denied: Permission "artifactregistry.repositories.uploadArtifacts" denied on project {parts[0]}'
        if self._project.resources.find("repository", f"{location}/{parts[1]}") is None:
            return f'name unknown: Repository "{parts[1]}" not found'
        return ""


def _images(project: Project, command: Invocation) -> list[JsonDict]:
    start = command.name("IMAGE_PATH")
    return [{"package": name.rpartition(":")[0], "tags": name.rpartition(":")[2], "version": digest}
            for name, digest in project.account.images.pushed.items() if name.startswith(start)]


def pull_error(project: Project, image: str, service_account: str) -> str:
    """Return why a machine of this service account cannot pull an image, or an empty text."""
    host, _, rest = image.partition("/")
    if host.endswith(("example.com", "example.org")):
        return f'failed to resolve reference "{image}": dial tcp: lookup {host}: no such host'
    own = host.endswith("-docker.pkg.dev") and not host.startswith(("us-docker", "gcr"))
    if not own:
        return ""
    location, parts = host.removesuffix("-docker.pkg.dev"), rest.split("/")
    resource = repository_path(project, location, parts[1] if len(parts) > 1 else "")
    if ArtifactRegistry(project).repository_error(image) or not project.account.images.is_pushed(image):
        return f'failed to resolve reference "{image}": {image}: not found'
    if not project.allows(f"serviceAccount:{service_account}", "pull", resource):
        return (f'failed to authorize: failed to fetch oauth token: 403 Forbidden: Permission '
                f'"artifactregistry.repositories.downloadArtifacts" denied for {service_account} on {resource}')
    return ""
