"""Writes the flags of kubectl's commands, as it lists them itself, for `embark rehearse --account`."""

import re
import subprocess
from pathlib import Path

import tomli_w

COMMANDS = (
    "annotate", "api-resources", "apply", "auth can-i", "cluster-info", "config current-context",
    "config get-contexts", "config use-context", "config view", "cp", "create", "create configmap", "create namespace",
    "create secret generic", "create serviceaccount", "delete", "describe", "diff", "drain", "cordon", "events",
    "exec", "get", "label", "logs", "patch", "port-forward", "replace", "rollout restart", "rollout status",
    "scale", "taint", "top nodes", "top pods", "uncordon", "version", "wait",
)
POSITIONALS = {"config use-context": ["NAME"], "create configmap": ["NAME"], "create namespace": ["NAME"],
               "create secret generic": ["NAME"], "create serviceaccount": ["NAME"]}
ALONE = ("--cascade", "--dry-run", "--validate")
"""Those that take a value, by `=` alone, and need none."""
TARGET = Path(__file__).parents[1] / "src/cloudsim/commands/kubectl.toml"
FLAG = re.compile(r"^ {4}(?:(-\w), )?(?:    )?(--[\w-]+)=(.*?):$", re.MULTILINE)


def flags(*words: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the kind of each flag, and the short names of flags."""
    text = subprocess.run(["kubectl", *words], capture_output=True, text=True, check=True).stdout
    kinds, aliases = {}, {}
    for short, name, default in FLAG.findall(text):
        kinds[name] = ("bool" if default in ("true", "false") else "repeat" if default == "[]" else
                       "optional" if name in ALONE else "value")
        if short:
            aliases[short] = name
    return kinds, aliases


def main() -> None:
    version = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True, check=True).stdout
    everywhere, aliases = flags("options")
    commands = {}
    for name in COMMANDS:
        own, short = flags(*name.split(), "--help")
        commands[name] = {"positionals": POSITIONALS.get(name, ["WORDS*"]), "aliases": short, "flags": own}
    about = {
        "version": version.splitlines()[0].rpartition(" ")[2], "date": "2026-11-15",
        "source": "kubectl COMMAND --help",
        "unknown_flag": "error: unknown flag: {flag}\nSee '{command} --help' for usage.",
        "unknown_command": 'error: unknown command "{words}" for "kubectl"',
        "missing_flag": "error: {flag} is required",
    }
    TARGET.write_text("# Written by cloudsim/tools/make_kubectl_commands.py.\n" + tomli_w.dumps(
        {"program": about, "flags": everywhere, "aliases": aliases, "commands": commands}))


if __name__ == "__main__":
    main()
