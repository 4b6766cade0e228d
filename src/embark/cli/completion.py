"""`embark completion`: a shell's completion script."""

from typing import Literal

from embark.cli.console import Console

SPEC_COMMANDS = ("train", "plan", "render", "rehearse", "launch", "bench", "doctor", "prepare", "make")
RUN_COMMANDS = ("watch", "report", "compare", "diagnose", "checkpoints", "cost", "runs")
MACHINE_COMMANDS = ("show", "compare")
BASH = """
_embark_and_names() {{
  _embark "$@"
  local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" names=""
  case "$word" in -*) return ;; esac
  case "$command" in
    data) case "${{COMP_WORDS[2]}}" in {specs}) names="{presets}" ;; esac ;;
    catalog) case "${{COMP_WORDS[2]}}" in {machine_commands}) names="{machines}" ;; esac ;;
    {specs}) names="{presets}" ;;
    {runs}) names="$(cd runs 2>/dev/null && ls -d -- */ 2>/dev/null | tr -d /)" ;;
  esac
  if [ "$COMP_CWORD" -gt 1 ] && [ -n "$names" ]; then
    mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -W "$names" -- "$word"; compgen -f -- "$word")
  fi
}}
complete -o bashdefault -o default -F _embark_and_names embark
"""
"""After cyclopts' own script: names that it cannot know. Without the options, bash would complete no file names."""


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a completion script for a shell: `source <(embark completion bash)`.

    bash also completes files, presets, the runs in ./runs and the catalog's machines.
    """
    from embark.cli.app import app

    script = app.generate_completion(shell=shell)
    if shell == "bash":
        from embark.catalog import load_catalog
        from embark.spec import PRESETS

        script = "\n".join(line for line in script.splitlines() if not line.startswith("complete -F"))
        script += BASH.format(
            specs="|".join(SPEC_COMMANDS), runs="|".join(RUN_COMMANDS), machine_commands="|".join(MACHINE_COMMANDS),
            presets=" ".join(PRESETS), machines=" ".join(sorted(load_catalog().machines)))
    Console().raw(script)
