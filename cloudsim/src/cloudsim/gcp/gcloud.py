"""`gcloud` and `gsutil`: check the flags, the project and the service, call the handler, and format the output."""

import re
from collections.abc import Mapping

from cloudsim.account import AnsweredBy, Call
from cloudsim.gcp.output import show
from cloudsim.gcp.project import Invocation, Project, facts
from cloudsim.grammar import load_grammar, load_handlers
from cloudsim.state import Refusal

HANDLERS = load_handlers("gcp", "project")
"""A handler returns a text, which is printed unchanged, or an object or a list, to which `--format` applies."""
NO_PROJECT = ("auth", "components", "config", "billing", "projects", "storage ls")
_DOTS = re.compile(r"\((gcloud [\w -]+)\)")


class Gcloud:
    """The stand-in for gcloud, which answers from a project's state."""

    name = "gcloud"
    answered_by: AnsweredBy = "stand-in"

    def __init__(self, project: Project) -> None:
        self.project = project
        self._grammar = load_grammar(self.name)

    def run(self, call: Call) -> str:
        try:
            parsed = self._grammar.parse(call.words)
        except Refusal as refusal:  # gcloud writes a command with dots in its messages.
            raise Refusal(_DOTS.sub(lambda found: f"({found[1].replace(' ', '.')})", refusal.text),
                          refusal.code) from None
        given = parsed.text("--project") or call.env.get("CLOUDSDK_CORE_PROJECT", "") or self.project.config.get(
            "project", "")
        command = Invocation(parsed, call, given)
        self._check_project(command)
        self._check_track(command)
        self._check_service(command)
        handler = HANDLERS.get(parsed.name)
        if handler is None:
            raise Refusal(f"gcloud {parsed.name} is not modelled by the simulated account", 70)
        found = handler(self.project, command)
        if isinstance(found, str | None):
            return found or ""
        return show(found, format_=parsed.text("--format"), filter_=parsed.text("--filter"),
                    flatten=parsed["--flatten"] or (), limit=parsed.text("--limit"))

    def _check_project(self, command: Invocation) -> None:
        if command.parsed.name.startswith(NO_PROJECT):
            return
        if not command.project:
            command.fail("The required property [project] is not currently set.\nYou may set it for your current "
                         "workspace by running:\n\n  $ gcloud config set project VALUE")
        if command.project not in (self.project.id, self.project.number):
            command.fail(f"PERMISSION_DENIED: Permission denied on resource project {command.project}.")

    def _check_track(self, command: Invocation) -> None:
        """Refuse alpha and beta commands that are not installed: gcloud would ask, and a script cannot answer."""
        track = command.parsed.path[0]
        if track in ("alpha", "beta") and track not in self.project.components:
            raise Refusal(f"You do not currently have this command group installed.  Using it requires the "
                          f"installation of components: [{track}]\nERROR: (gcloud.{track}) run: gcloud components "
                          f"install {track}")

    def _check_service(self, command: Invocation) -> None:
        name = command.parsed.name
        starts = [start for start in facts()["apis"] if name == start or name.startswith(f"{start} ")]
        service = facts()["apis"][max(starts, key=len)] if starts else ""
        if service and service.partition(".")[0] not in self.project.services:
            command.fail(f"PERMISSION_DENIED: {service} has not been used in project {self.project.number} before or "
                         f"it is disabled. Enable it by visiting https://console.developers.google.com/apis/api/"
                         f"{service}/overview?project={self.project.id} then retry.")


class Gsutil:
    """The older program for buckets, translated to the commands of `gcloud storage`."""

    name = "gsutil"
    answered_by: AnsweredBy = "stand-in"
    COMMANDS: Mapping[str, tuple[str, ...]] = {
        "mb": ("storage", "buckets", "create"), "rb": ("storage", "buckets", "delete"), "ls": ("storage", "ls"),
        "cp": ("storage", "cp"), "rm": ("storage", "rm"), "rsync": ("storage", "rsync")}

    def __init__(self, gcloud: Gcloud) -> None:
        self._gcloud = gcloud

    def run(self, call: Call) -> str:
        words = [word for word in call.words if word != "-m"]
        if not words or words[0] not in self.COMMANDS:
            raise Refusal(f'CommandException: Invalid command "{words[0] if words else ""}".')
        flags = {"-r": "--recursive", "-R": "--recursive", "-l": "--location", "-p": "--project"}
        new = (*self.COMMANDS[words[0]], *(flags.get(word, word) for word in words[1:]))
        return self._gcloud.run(Call("gcloud", new, call.folder, call.env, call.stdin))
