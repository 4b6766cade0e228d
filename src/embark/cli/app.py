"""Every command, registered by import path: `embark --help` imports none of them, and a command only its own module."""

from cyclopts import App, CycloptsError, Group, Parameter, UnknownCommandError, UnusedCliTokensError

from embark import __version__
from embark.errors import UserError, nearest

COMMANDS = {
    "Train": {
        "init": ("init:init", "Write a starter spec."),
        "train": ("train:train", "Train a spec on this machine; run it again to resume."),
        "bench": ("bench:bench", "Compare Embark's training speed with stock TorchRec's."),
        "checkpoints": ("checkpoints:checkpoints", "List, verify, compare or prune a run's checkpoints."),
    },
    "Data": {
        "data prepare": ("data:prepare", "Turn CSV, Parquet or Criteo files into prepared data."),
        "data make": ("data:make", "Write a spec's synthetic samples as prepared data."),
        "data check": ("data:check", "Verify prepared data: checksums, ranges, label leaks."),
        "data copy": ("data:copy", "Copy data between this machine and s3://, gs://, az://."),
    },
    "Plan": {
        "plan": ("plan:plan", "Predict what fits, step time, hours and dollars."),
        "catalog list": ("catalog:list_", "List machines: accelerators, memory, fabric, price."),
        "catalog show": ("catalog:show", "Show one machine and its price in every region."),
        "catalog compare": ("catalog:compare", "Compare machines side by side."),
        "catalog volumes": ("catalog:volumes", "List storage: throughput and price."),
        "catalog refresh": ("catalog:refresh", "Import a newer price file."),
        "cost": ("cost:cost", "Show what a run has cost and what it will cost."),
    },
    "Deploy": {
        "render": ("render:render", "Write the manifests, image, cluster and scripts a target needs."),
        "lint": ("lint:lint", "Find mistakes in manifests, Dockerfiles and launch scripts."),
        "rehearse": ("rehearse:rehearse", "Run the rendered job on this machine before paying for GPUs."),
        "launch": ("launch:launch", "Launch a run where its spec says."),
        "status": ("status:status", "Show the state of launched runs."),
        "logs": ("logs:logs", "Print the logs of a launched run."),
        "cancel": ("cancel:cancel", "Stop a launched run after a last checkpoint."),
    },
    "Observe": {
        "watch": ("watch:watch", "Show runs live in the browser or the terminal."),
        "report": ("report:report", "Write one HTML file about a run."),
        "compare": ("compare:compare", "Compare runs: specs, results, curves."),
        "diagnose": ("diagnose:diagnose", "Find why a run failed or is slow, and the fix."),
    },
    "Environment": {
        "doctor": ("doctor:doctor", "Check this machine, or a cloud account."),
        "completion": ("completion:completion", "Print a shell completion script."),
    },
}
"""Group → command → its function under `embark.cli`, and its line in `--help`; `--help` of the command itself shows the
function's docstring."""
OPTIONS = Group("Options", sort_key=len(COMMANDS))
SUBCOMMANDS = {
    "data": "Prepare, make, check and copy training data.",
    "catalog": "Machines, prices and storage of AWS, Azure and Google Cloud.",
}


def _make_app() -> App:
    root = App(name="embark", version=__version__, help_format="plaintext", group_parameters=OPTIONS,
               default_parameter=Parameter(show_default=lambda value: str(value) if value else None),
               help="Train recommendation models on TorchRec, from a laptop to a GPU fleet, from one spec.")
    for number, (title, commands) in enumerate(COMMANDS.items()):
        group = Group(title, sort_key=number)
        for position, (name, (path, summary)) in enumerate(commands.items()):
            parent, _, command = name.rpartition(" ")
            if parent and parent not in root:
                root.command(App(name=parent, help=SUBCOMMANDS[parent], help_format="plaintext", group=group,
                                 sort_key=position))
            (root[parent] if parent else root).command(
                f"embark.cli.{path}", name=command, help=summary, sort_key=position, group=None if parent else group)
    root["--help"].group = root["--version"].group = OPTIONS
    return root


def explain(error: CycloptsError) -> UserError:
    """What is wrong with a command line, and whose `--help` says what is right."""
    fix = " ".join(["embark", *(error.command_chain or ()), "--help"])
    if isinstance(error, UnknownCommandError) and error.unused_tokens and error.app:
        word = error.unused_tokens[0]
        if not word.startswith("-"):
            return UserError(f"{word}: no such command", fix=nearest(word, [n for n in error.app if n[0] != "-"]))
        return UserError(f"{word}: no such option", fix=fix)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return UserError(f"unexpected argument {error.unused_tokens[0]!r}", fix=fix)
    return UserError(str(error), fix=fix)


app = _make_app()
