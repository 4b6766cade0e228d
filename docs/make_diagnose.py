"""Writes docs/diagnose.md: the rules of `embark diagnose`, and how well they do on the fixtures.

`make docs` runs it. The rules are read from their rows; expected.toml, beside the fixtures, says what must be found.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from embark.diagnose import Diagnosis, Rule, diagnose, load_rules, sources_of

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "diagnose"
EXAMPLE = FIXTURES / "faulty" / "gpu_oom_one_rank.log"
GROUPS = {
    "EMD1": "GPUs and their driver", "EMD2": "NCCL and the network", "EMD3": "Rendezvous and torchrun",
    "EMD4": "The machine: memory, disk, files", "EMD5": "Packages and versions", "EMD6": "Stores and credentials",
    "EMD7": "Kubernetes, Kubeflow, Kueue", "EMD8": "Clouds, Vertex AI, Ray, TorchX, TPU",
    "EMD9": "Training, data, pace",
}

HEAD = """# embark diagnose

A run fails with a thousand lines, and the line that tells why is seldom the last: one rank runs out of memory, and all
the others report network errors. `embark diagnose` reads all of it and gives the cause in one sentence, with the line
that shows it and a fix.

```bash
embark diagnose runs/dlrm                    # a run: its events, its spec, and the logs beside them
embark diagnose dlrm                         # a launched run: also the events and logs of its cluster or machines
embark diagnose logs/                        # a folder of logs, one a rank or one a pod; .gz too
embark diagnose rank0.log rank1.log job.yaml # files; manifests are linted
kubectl logs -l batch.kubernetes.io/job-name=dlrm --prefix --tail=-1 | embark diagnose -
kubectl get events | embark diagnose - --spec dlrm.toml
embark diagnose logs/ --json
```

The exit code is 1 if something is found, and 0 if nothing is. Nothing is created, changed or deleted.

- **The cause comes first.** Rules are of four kinds. A `cause` ends a run by itself; a `symptom` is what the other
  ranks then report; a `summary` is what a launcher prints at the end; with `slow` the run continues, slower than it
  should. Symptoms and summaries are listed with their cause, and on their own only if no cause is found. Among equals,
  the first in time wins.
- **What is over is not reported.** A pod that waited for a node and got one, an image that was pulled at the second
  try: a later line cancels the finding.
- **Everything counts together.** For a launched run that is the events of Kubernetes (or Ray, Vertex AI, the machines),
  every rank's log, the run's own events and its spec; manifests beside them are linted.
- **The spec helps.** With it (a run has its own, `--spec` names one) TCP where the machine has EFA, InfiniBand or
  GPUDirect is found in NCCL's lines (`NCCL_DEBUG=INFO`), and out of memory is answered with what the plan says would
  fit. One machine on TCP among others with a fabric is found without it.
- **A rank is named** if it is behind the others in its collectives, or slower than they are.
- **Any log.** Colours, progress bars, rank and pod prefixes, interleaved lines, bytes that are not text, files of many
  gigabytes: they are read in pieces, in constant memory. Nothing of a log is executed, and control
  characters and secrets are not quoted.

## Example

"""


def page() -> str:
    """The whole page."""
    lines = [HEAD + "```text", *_example(), "```", "", "## Accuracy", "", *_measured(), "", "## Rules"]
    for prefix, title in GROUPS.items():
        lines += ["", f"### {title}", "", "| code | name | kind | looks at | cause | fix | try |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [_line(rule) for rule in load_rules() if rule.code.startswith(prefix)]
    return "\n".join(lines) + "\n"


def _measured() -> list[str]:
    expected: dict[str, list[str]] = tomllib.loads((FIXTURES / "expected.toml").read_text())["faulty"]
    num_right = sum([one.name for one in _look(FIXTURES / "faulty" / f"{name}.log")] == names
                    for name, names in expected.items())
    healthy = sorted((FIXTURES / "healthy").iterdir())
    num_silent = sum(not _look(path) for path in healthy)
    return [
        "Every log under `tests/fixtures/diagnose` was read alone. They are excerpts in the form of the real texts,",
        "written for this purpose; `expected.toml` lists what must be found, and nothing else may be.",
        "", "| logs | number | right |", "|---|---|---|",
        f"| faulty: the diagnosis, and no other | {len(expected)} | {num_right} |",
        f"| healthy or unrelated: nothing | {len(healthy)} | {num_silent} |",
        "", "The rules were written with these logs at hand, so the figures show that nothing is broken, not how often",
        "an unseen log is understood. Of 54 that were written to find out, 22 got the right cause at",
        "once, 9 a lesser or a wrong one, 7 that Python ended with an error, and 16 nothing; of 10 harmless ones that",
        "look dangerous one was reported. Rules were fixed and added for them, and they are counted above.",
    ]


def _line(rule: Rule) -> str:
    host = rule.source.split("/")[2]
    link = f"[{rule.code}]({rule.source} \"{host}\")"
    command = f"`{rule.command}`" if rule.command else ""
    cells = [link, rule.name, rule.kind, ", ".join(rule.where), rule.cause, rule.fix, command]
    plain = (cell.replace("|", "&#124;").replace("{{", "{").replace("}}", "}") for cell in cells)
    return f"| {' | '.join(plain)} |"


def _example() -> list[str]:
    one = _look(EXAMPLE)[0]
    return [
        f"{one.code} {one.name}", f"    {one.cause}", f"    seen: rank3.log:{one.evidence.line}: {one.evidence.text}",
        f"    follows from it: {', '.join(one.follows)}", f"    fix: {one.fix}", f"    try: {one.command}",
    ]


def _look(path: Path) -> tuple[Diagnosis, ...]:
    return diagnose(sources_of([str(path)]).sources).diagnoses


if __name__ == "__main__":
    sys.stdout.write(page())
