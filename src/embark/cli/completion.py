"""`embark completion`: a shell's completion script."""

from typing import Literal

from embark.cli.console import Console


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a completion script for a shell: `source <(embark completion bash)`."""
    from embark.cli.app import app

    # Without the options, bash would complete no file names.
    Console().raw(app.generate_completion(shell=shell).replace("complete -F", "complete -o bashdefault -o default -F"))
