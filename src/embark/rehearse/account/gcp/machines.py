"""A machine's first start: its cloud-init file or its startup script runs here, and what they call is recorded."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embark.rehearse.account.gcp import object_store, training
from embark.rehearse.account.gcp.project import Invocation, Project
from embark.rehearse.account.gcp.registry import pull_error
from embark.rehearse.account.state import Resource
from embark.spec.load import parse_spec

OWN = ("/etc/embark", "/var/lib/embark", "/opt/embark", "/usr/local/bin", "/var/log")
"""Folders of a machine that its programs write, which lie below one folder here."""
PROGRAMS = ("docker", "gcloud", "nvidia-smi", "lsblk", "apt-get", "mdadm", "mkfs.ext4", "mount", "systemctl", "sleep",
            "systemd-run", "python3.11", "pip", "docker-credential-gcr")
STUB = """#!/bin/bash
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\0'; } >>"$RECORD"
case "${0##*/} $*" in
  "gcloud auth configure-docker "*) for word in "$@"; do printf '%s\\n' "$word" >>"$LOGINS"; done ;;
  "docker pull "*)
    host=${2%%/*}
    if [[ $host == *-docker.pkg.dev ]] && ! grep -q -F "$host" "$LOGINS"; then
      echo "Error response from daemon: Head \\"https://$host/v2/\\": denied: Unauthenticated request. Unauthenticated \
requests do not have permission \\"artifactregistry.repositories.downloadArtifacts\\" (or it may not exist)" >&2
      exit 1
    fi
    if [ -n "$PULL_ERROR" ]; then echo "Error response from daemon: $PULL_ERROR" >&2; exit 1; fi ;;
  "gcloud storage cp gs://"*)
    if [ -n "$READ_ERROR" ]; then echo "ERROR: (gcloud.storage.cp) $READ_ERROR" >&2; exit 1; fi
    cp -r "$BUCKETS/${3#gs://}" "$4" || exit 1 ;;
  "python3.11 -m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/pip"; cp "$0" "$3/bin/python" ;;
  "pip install "*)
    for word in "$@"; do
      file=${word%%[*}
      if [[ $file == *.whl ]] && [ ! -f "$file" ]; then echo "ERROR: $file: no such file" >&2; exit 1; fi
      if [[ $word == embark-rec* ]]; then echo "ERROR: No matching distribution found for $word" >&2; exit 1; fi
    done ;;
esac
exit 0
"""
LIMIT_S = 60


@dataclass(frozen=True, slots=True)
class Service:
    """What a machine runs once it has started, or why it does not."""

    words: tuple[str, ...]
    spec: str
    trouble: str = ""


def boot(project: Project, name: str, metadata: Mapping[str, str], service_account: str,
         scopes: Sequence[str]) -> Service:
    """Run what the machine is given at its first start."""
    root = project.account.folder / "machines" / name
    root.mkdir(parents=True, exist_ok=True)
    programs = root / "programs"
    programs.mkdir(exist_ok=True)
    for program in PROGRAMS:
        (programs / program).write_text(STUB)
        (programs / program).chmod(0o755)
    text = metadata.get("user-data") or metadata.get("startup-script") or ""
    if not text:
        return Service((), "", "the machine has no user-data and no startup-script: nothing runs on it")
    if "user-data" in metadata and not text.startswith("#cloud-config"):
        return Service((), "", "cloud-init: user-data does not begin with #cloud-config and is ignored")
    env = _environment(project, root, name, text, service_account, scopes)
    if "user-data" in metadata:
        given = yaml.safe_load(text)
        for file in given.get("write_files", ()):
            _write(root, str(file["path"]), str(file["content"]))
        scripts = [str(words[0]) for words in given.get("runcmd", ()) if str(words[0]).startswith("/")]
        starts = any("systemctl" in words and "embark.service" in words for words in given.get("runcmd", ()))
        troubles = [_run(root, _here(root, path), env) for path in scripts]
        unit = root / "etc/systemd/system/embark.service"
        found = re.search(r"^ExecStart=(\S+)", unit.read_text(), re.MULTILINE) if unit.exists() and starts else None
        if found is None:
            return Service((), "", "no service embark.service is enabled: nothing trains")
        troubles.append(_run(root, _here(root, _there(root, found[1])), env))
    else:
        _write(root, "/usr/local/bin/startup-script", text)
        troubles = [_run(root, root / "usr/local/bin/startup-script", env)]
    spec = root / "etc/embark/spec.toml"
    calls = [call.split("\0") for call in Path(env["RECORD"]).read_text().split("\0\0") if call]
    words = _trained(calls)
    trouble = next((one for one in troubles if one), "")
    return Service(tuple(_there(root, word) for word in words), spec.read_text() if spec.exists() else "",
                   trouble or ("" if words else "the machine's programs start no training"))


def access_trouble(project: Project, spec_text: str, service_account: str, scopes: Sequence[str]) -> str:
    """What the run's spec names and a machine of this service account cannot reach."""
    spec = parse_spec(spec_text)
    if spec is None:
        return "spec.toml: is not a spec"
    member = f"serviceAccount:{service_account}"
    for uri, what in ((str(spec.data.path), "read"), (str(spec.store.root), "write")):
        if not uri.startswith("gs://"):
            continue
        name = uri.removeprefix("gs://").partition("/")[0]
        if project.account.resources.find("bucket", name) is None:
            return f"404 from Cloud Storage: The specified bucket does not exist. ({uri})"
        if not any("cloud-platform" in one for one in scopes) or not project.allows(member, what, f"buckets/{name}"):
            verb = "storage.objects.create" if what == "write" else "storage.objects.get"
            return f"403 from Cloud Storage: {service_account} does not have {verb} access to {uri}"
    return ""


def answer(project: Project, command: Invocation, instance: Resource) -> str:
    """What `gcloud compute ssh NAME --command=…` prints; following the log waits for the training."""
    words = command.text("--command")
    if "tail" not in words:
        return ""
    run = instance.attributes["labels"].get("embark-run", "")
    group = sorted((one for one in project.account.resources.of_kind("instance")
                    if one.attributes["labels"].get("embark-run", "") == run), key=lambda one: one.name)
    if "logs" not in instance.attributes:
        _train(project, command, run, group)
    return str(instance.attributes["logs"])


def _train(project: Project, command: Invocation, run: str, group: list[Resource]) -> None:
    services = []
    for one in group:
        name = one.name.rpartition("/")[2]
        account, scopes = one.attributes["service_account"], one.attributes["scopes"]
        found = boot(project, name, one.attributes["metadata"], account, scopes)
        trouble = found.trouble or access_trouble(project, found.spec, account, scopes)
        if trouble:
            command.fail(f"[/usr/bin/ssh] the log of {name} ends with, and the service restarts for ever: {trouble}")
        services.append(found)
    spec = parse_spec(services[0].spec)
    assert spec is not None
    if len(group) != spec.place.nodes:
        command.fail(f"[/usr/bin/ssh] the log of {group[0].name} waits for ever: {len(group)} of "
                     f"{spec.place.nodes} machines have joined")
    done = training.train(run, [one.words for one in services], {}, services[0].spec)
    if not done.is_ok:
        command.fail(f"[/usr/bin/ssh] exited with return code [1]. {done.sentence}")
    for one, log in zip(group, done.logs, strict=True):
        one.attributes["logs"] = log


def _trained(calls: Sequence[Sequence[str]]) -> list[str]:
    """The words of the last `docker run IMAGE …` or `systemd-run …`."""
    for call in reversed(calls):
        if call[:2] == ["docker", "run"]:
            at = next((index for index, word in enumerate(call) if word == "python"), 0)
            return list(call[at:]) if at else []
        if call[0] == "systemd-run":
            rest = [word for word in call[1:] if not word.startswith("--") or "=" not in word]
            return ["python", *rest[1:]] if rest else []
        if call[0] == "python" and "embark.torchrun" in call:
            return list(call)
    return []


def _environment(project: Project, root: Path, name: str, text: str, account: str, scopes: Sequence[str]
                 ) -> dict[str, str]:
    image = re.search(r"docker pull (\S+)", text)
    bucket = re.search(r"gcloud storage cp gs://([^/\s]+)", text)
    may_read = bool(bucket) and project.allows(f"serviceAccount:{account}", "read", f"buckets/{bucket and bucket[1]}")
    (root / "logins").touch()
    (root / "record").write_text("")
    return {
        "PATH": f"{root / 'programs'}:{os.defpath}", "HOSTNAME": name, "HOME": str(root),
        "RECORD": str(root / "record"), "LOGINS": str(root / "logins"),
        "BUCKETS": str(object_store.folder(project.account, "")),
        "PULL_ERROR": pull_error(project, image[1].strip("'\""), account) if image else "",
        "READ_ERROR": "" if may_read and any("cloud-platform" in one for one in scopes) else
        f"HTTPError 403: {account} does not have storage.objects.get access to the Google Cloud Storage object."}


def _write(root: Path, path: str, content: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(re.sub(rf"(?<![\w.-])({'|'.join(map(re.escape, OWN))})(?=[/\s\"':\]]|-wheels)",
                           lambda found: f"{root}{found[1]}", content) if content.startswith("#!") else content)
    file.chmod(0o755)


def _here(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _there(root: Path, word: str) -> str:
    return word.replace(str(root), "")


def _run(root: Path, script: Path, env: Mapping[str, str]) -> str:
    """The last line of what it said where it failed."""
    for folder in OWN:
        (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["bash", str(script)], env=dict(env), cwd=root, capture_output=True, text=True,
                          timeout=LIMIT_S, stdin=subprocess.DEVNULL, check=False)
    if done.returncode == 0:
        return ""
    lines: list[Any] = [line for line in done.stderr.splitlines() if line.strip()]
    return str(lines[-1]) if lines else f"{script.name} ended with {done.returncode}"
