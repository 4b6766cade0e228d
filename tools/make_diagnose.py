"""Writes docs/reference/diagnose.md: the rules of `embark diagnose`, and their accuracy on the fixtures.

`make docs` runs it. The rules come from their TOML files; expected.toml, beside the fixtures, lists what must be found.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from embark.diagnose.report import diagnose
from embark.diagnose.scan import Diagnosis, Rule, load_rules
from embark.diagnose.source import sources_of

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "diagnose"
EXAMPLE = FIXTURES / "faulty" / "gpu_oom_one_rank.log"
GROUPS = {
    "EMD1": "GPUs and their driver", "EMD2": "NCCL and the network", "EMD3": "Rendezvous and torchrun",
    "EMD4": "The machine: memory, disk, files", "EMD5": "Packages and versions", "EMD6": "Stores and credentials",
    "EMD7": "Kubernetes, Kubeflow, Kueue", "EMD8": "Clouds, Vertex AI, Ray, TorchX, TPU",
    "EMD9": "Training, data, pace",
}

HEAD = """# embark diagnose

A failed run leaves thousands of lines, and the one with the cause is seldom the last: one rank runs out of memory, and
all the others report network errors. `embark diagnose` reads everything and gives the cause in one sentence, with the
evidence and a fix.

```bash
embark diagnose runs/dlrm                    # a run: its events, its spec, and the logs beside them
embark diagnose dlrm                         # a launched run: also the events and logs of its cluster or machines
embark diagnose logs/                        # a folder of logs, one per rank or pod; .gz too
embark diagnose rank0.log rank1.log job.yaml # files
kubectl logs -l batch.kubernetes.io/job-name=dlrm --prefix --tail=-1 | embark diagnose -
kubectl get events | embark diagnose - --spec dlrm.toml
embark diagnose logs/ --json
```

The exit code is 1 if something is found, and 0 if nothing is. Nothing is created, changed or deleted.

- **The cause comes first.** Rules are of five kinds. A `cause` ends a run by itself; a `symptom` is what the other
  ranks then report; a `summary` is what a launcher prints at the end; with `slow` the run continues, slower than it
  should; `quality` is what its figures say about the model, such as overfitting, with the next thing to try, and is
  named at the end of the run too. Symptoms and summaries are listed with their cause, and on their own only if no
  cause is found. Among equals, the first in time wins.
- **Resolved problems are not reported.** If a pod waited for a node and got one, or an image was pulled at the second
  attempt, the later line cancels the finding.
- **All sources are read together.** For a launched run these are the events of Kubernetes or Vertex AI, every
  rank's log, the run's own events and its spec.
- **The spec adds rules.** With it (a run has its own, `--spec` names one) NCCL's lines (`NCCL_DEBUG=INFO`) reveal TCP
  on machines with EFA, InfiniBand or GPUDirect, and for out-of-memory errors the plan gives a setup that fits. One
  machine on TCP among others with a fabric is found without the spec.
- **A rank is named** if it is behind the others in its collectives, or slower than they are.
- **Any log.** Colours, progress bars, rank and pod prefixes, interleaved lines, bytes that are not text, files of many
  gigabytes: they are read in pieces, in constant memory. Nothing in a log is executed, and control characters and
  secrets are not quoted.

## Example

"""


def page() -> str:
    """The complete page."""
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
        "Every log under `tests/fixtures/diagnose` was read alone. The logs are excerpts in the form of real ones,",
        "written for this purpose; `expected.toml` lists exactly what must be found.",
        "", "| logs | number | right |", "|---|---|---|",
        f"| faulty: the diagnosis, and no other | {len(expected)} | {num_right} |",
        f"| healthy or unrelated: nothing | {len(healthy)} | {num_silent} |",
        "", "The rules were written with these logs in view, so the figures are a regression test and no estimate for",
        "unseen logs. Of 54 logs written for such an estimate, 22 got the right cause, 9 a lesser or wrong one,",
        "7 only that Python ended with an error, and 16 none; of 10 harmless logs that look dangerous, one was",
        "reported. Rules were then fixed and added, and these logs are counted above.",
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
