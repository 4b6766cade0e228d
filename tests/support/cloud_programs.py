"""The clouds' command lines as far as plain machines and TPUs need them: what they make is kept in memory, and what
they print has the form that they print it in. ssh answers as a machine's supervisor would."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from embark.launch.shell import CommandResult, LineStream, Shell

NOT_THERE = CommandResult(1, err="ERROR: NOT_FOUND: was not found")
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHostKey root@machine"


class Clouds(Shell):
    """Changes are kept in `made`; `calls` are all commands in order. It can be interrupted after any change."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.changes: list[list[str]] = []
        self.made: dict[str, dict[str, Any]] = {}
        """By the kind and name of a thing."""
        self.supervisors: dict[str, dict[str, Any]] = {}
        """By the machine's name."""
        self.interrupt_after: int | None = None
        self.is_ssh_away = False
        self.num_created = 0
        self.own_address = "203.0.113.7"

    def ask(self, words: Sequence[str], *, stdin: str = "", timeout_s: float = 60.0) -> CommandResult:
        self.calls.append(list(words))
        return self._answer(list(words), stdin)

    def change(
        self, words: Sequence[str], *, stdin: str = "", stdin_name: str = "", timeout_s: float = 60.0
    ) -> CommandResult:
        self.calls.append(list(words))
        self.changes.append(list(words))
        done = self._answer(list(words), stdin)
        if self.interrupt_after is not None and len(self.changes) > self.interrupt_after:
            raise KeyboardInterrupt
        return done

    def lines(self, words: Sequence[str]) -> LineStream:
        return LineStream(["printf", "log 1\\n0 2026-11-15T10:00:00Z it says\\n"])

    def names(self, kind: str) -> list[str]:
        return sorted(key.partition(" ")[2] for key in self.made if key.startswith(f"{kind} "))

    def paid(self) -> list[str]:
        return [*self.names("machine"), *self.names("request")]

    def _answer(self, words: list[str], stdin: str) -> CommandResult:
        program = words[0]
        if program == "ssh-keygen":
            return _keygen(words)
        if program == "curl":
            return CommandResult(0, f"{self.own_address}\n")
        if program == "ssh" and "-V" not in words:
            return self._ssh(words, next(w.rpartition("@")[2] for w in words if "@" in w and "=" not in w))
        if words[1:5] == ["compute", "tpus", "tpu-vm", "ssh"]:
            return self._ssh(words, f"{words[5]} {_option(words, '--worker')}")
        return {"gcloud": self._gcloud, "az": self._az, "aws": self._aws}.get(program, lambda _: CommandResult(0))(
            words
        )

    def _gcloud(self, words: list[str]) -> CommandResult:
        at = " ".join(words[1:])
        if at.startswith("compute instances create"):
            return self._machine(words[4], {"status": "RUNNING", "id": str(1000 + self.num_created)})
        if at.startswith("compute instances list"):
            return CommandResult(0, json.dumps([{"name": name, **self.made[f"machine {name}"]}
                                       for name in self.names("machine")]))
        if at.startswith("compute instances start"):
            self.made[f"machine {words[4]}"]["status"] = "RUNNING"
            self.supervisors.pop(words[4], None)
            return CommandResult(0)
        if at.startswith("compute instances delete"):
            return self._gone(f"machine {words[4]}")
        if at.startswith("compute instances get-guest-attributes"):
            return CommandResult(0, "ssh-rsa\tAAAAB3\nssh-ed25519\tAAAAC3NzaC1lZDI1NTE5AAAAIHostKey\n")
        if at.startswith("compute tpus queued-resources create"):
            return self._new(f"request {words[5]}", {"state": {"state": "WAITING_FOR_RESOURCES"}})
        if at.startswith("compute tpus queued-resources describe"):
            result = self.made.get(f"request {words[5]}")
            return CommandResult(0, json.dumps(result)) if result else NOT_THERE
        if at.startswith("compute tpus queued-resources delete"):
            return self._gone(f"request {words[5]}")
        for kind in ("firewall-rules", "resource-policies"):
            if f"compute {kind} " in f"{at} ":
                name = next(w for w in words[4:] if w.startswith("embark-"))
                verb = words[3]
                if verb == "describe":
                    return CommandResult(0) if f"{kind} {name}" in self.made else NOT_THERE
                return self._new(f"{kind} {name}", {}) if verb == "create" else self._gone(f"{kind} {name}")
        return CommandResult(0, "{}")

    def _az(self, words: list[str]) -> CommandResult:
        at, name = " ".join(words[1:]), _option(words, "--name")
        if at.startswith("group create"):  # again is no mistake, as in the real one
            self.made.setdefault(f"group {name}", {})
            return CommandResult(0)
        if at.startswith("group show"):
            return CommandResult(0, "{}") if f"group {name}" in self.made else NOT_THERE
        if at.startswith("group delete"):
            for machine in self.names("machine"):
                self._gone(f"machine {machine}")
            return self._gone(f"group {name}")
        if at.startswith("vm create"):
            return self._machine(name, {"powerState": "VM running", "provisioningState": "Succeeded",
                                        "publicIps": f"52.0.0.{self.num_created}", "vmId": f"id-{self.num_created}"})
        if at.startswith("vm start"):
            self.made[f"machine {name}"]["powerState"] = "VM running"
            return CommandResult(0)
        if at.startswith("vm list"):
            return CommandResult(
                0, json.dumps([{"name": one, **self.made[f"machine {one}"]} for one in self.names("machine")])
            )
        if at.startswith("vm run-command"):
            return CommandResult(0, f"Enable succeeded: \n[stdout]\n{HOST_KEY}\n\n[stderr]\n")
        return CommandResult(0, "id-of-it")

    def _aws(self, words: list[str]) -> CommandResult:
        verb = words[2] if len(words) > 2 else ""
        if verb == "run-instances":
            tags, number = next(w for w in words if w.startswith("ResourceType")), self.num_created
            rank = tags.partition("embark-rank,Value=")[2].rstrip("}]")
            return self._machine(f"i-{number}", {
                "InstanceId": f"i-{number}", "State": {"Name": "running"},
                "PrivateIpAddress": f"10.0.0.{number}", "LaunchTime": f"2026-11-15T10:0{number}:00Z",
                "Tags": [{"Key": "embark-rank", "Value": rank}, {"Key": "Name", "Value": f"dlrm-{rank}"}]})
        if verb == "describe-instances":
            return CommandResult(0, json.dumps({"Reservations": [{"Instances": [
                self.made[f"machine {name}"] for name in self.names("machine")]}]}))
        if verb == "start-instances":
            self.made[f"machine {words[-1]}"]["State"] = {"Name": "running"}
            return CommandResult(0)
        if verb == "terminate-instances":
            for word in words[words.index("--instance-ids") + 1:]:
                self._gone(f"machine {word}")
            return CommandResult(0)
        if verb == "get-command-invocation":
            return CommandResult(0, f"{HOST_KEY}\n")
        if verb in ("describe-subnets", "send-command"):
            return CommandResult(0, "id-1\n")
        name = next((word for word in words if word.startswith("embark-")), "sg-1")
        kinds = {"role": "role", "instance-profile": "profile", "placement-group": "placement",
                 "security-group": "group"}
        for ending, kind in kinds.items():
            if verb in (f"get-{ending}", f"describe-{ending}s"):
                there = f"{kind} {name}" in self.made or (kind == "group" and "group sg-1" in self.made)
                return CommandResult(0, "sg-1\n" if there else "None\n") if there or kind == "group" else NOT_THERE
            if verb == f"create-{ending}":
                self._new(f"{kind} {'sg-1' if kind == 'group' else name}", {})
                return CommandResult(0, "sg-1\n")
            if verb == f"delete-{ending}":
                return self._gone(f"{kind} {'sg-1' if kind == 'group' else name}")
        return CommandResult(0)

    def _ssh(self, words: list[str], name: str) -> CommandResult:
        if self.is_ssh_away:
            return CommandResult(255, err="ssh: connect to host: Connection timed out")
        line = shlex.split(words[-1])[-1]
        if "supervisor.py start" in line:
            self.supervisors.setdefault(name, {"is_alive": True, "code": None})
        supervisor = self.supervisors.get(name)
        if "supervisor.py" in line and supervisor is None:
            return CommandResult(2, err="python3: can't open file '/var/lib/embark-run/supervisor.py': [Errno 2]")
        if supervisor is None:
            return CommandResult(0)
        if "supervisor.py start" in line and supervisor["code"] is None:
            supervisor["is_alive"] = True
        if "supervisor.py stop" in line:
            supervisor.update(is_alive=False, code=75, was_stopped=True, ended_s=2.0)
        return CommandResult(0, json.dumps({"started_s": 1.0, "phase": "running", **supervisor}))

    def _machine(self, name: str, values: dict[str, Any]) -> CommandResult:
        self.num_created += 1
        return self._new(f"machine {name}", values)

    def _new(self, key: str, values: dict[str, Any]) -> CommandResult:
        assert key not in self.made, f"{key} is made twice"
        self.made[key] = values
        return CommandResult(0)

    def _gone(self, key: str) -> CommandResult:
        self.supervisors.pop(key.partition(" ")[2], None)
        return CommandResult(0) if self.made.pop(key, None) is not None else NOT_THERE


def _keygen(words: list[str]) -> CommandResult:
    from pathlib import Path

    path = Path(words[words.index("-f") + 1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("private")
    path.with_name(f"{path.name}.pub").write_text("ssh-ed25519 AAAAC3Nza embark\n")
    return CommandResult(0)


def _option(words: list[str], name: str) -> str:
    for index, word in enumerate(words):
        if word == name:
            return words[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""
