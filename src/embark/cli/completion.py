"""`embark completion`: a shell's completion script."""

from pathlib import Path
from typing import Literal

from embark.cli.console import Console

SPEC_COMMANDS = ("train", "plan", "render", "rehearse", "launch", "bench", "doctor", "data prepare", "data make")
RUN_COMMANDS = ("watch", "report", "compare", "diagnose", "checkpoints", "cost", "runs compare", "runs remove",
                "evaluate", "embeddings", "data ids")
MACHINE_COMMANDS = ("catalog show", "catalog compare")
GROUPS = ("data", "catalog", "runs")  # Their commands are two words.


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a completion script for a shell: `source <(embark completion bash)`.

    It completes commands, flags, files, presets, the runs in ./runs and the catalog's machines.

    The same line works in zsh; in fish it is `embark completion fish | source`.
    """
    from embark.catalog import load_catalog
    from embark.cli.app import app
    from embark.spec import PRESETS

    # Ours come after cyclopts' own, which cannot know them and, in bash, would complete no files.
    script = "\n".join(line for line in app.generate_completion(shell=shell).splitlines()
                       if not line.startswith(("complete -F", "compdef ")))
    script += Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8")
    presets, machines = " ".join(PRESETS), " ".join(sorted(load_catalog().machines))
    if shell == "fish":
        script += _fish_lines(presets, machines)
    for name, text in {"GROUPS": "|".join(GROUPS), "PRESETS": presets, "MACHINES": machines,
                       "SPEC_COMMANDS": _pattern(SPEC_COMMANDS), "RUN_COMMANDS": _pattern(RUN_COMMANDS),
                       "MACHINE_COMMANDS": _pattern(MACHINE_COMMANDS)}.items():
        script = script.replace(f"@{name}@", text)
    Console().raw(script)


def _pattern(commands: tuple[str, ...]) -> str:
    return "|".join(f'"{command}"' for command in commands)


def _fish_lines(presets: str, machines: str) -> str:
    names = {SPEC_COMMANDS: presets, RUN_COMMANDS: "(__fish_embark_runs)", MACHINE_COMMANDS: machines}
    return "".join(f"complete -c embark -n '__fish_embark_using_command {command}' -a '{words}'\n"
                   for commands, words in names.items() for command in commands)
