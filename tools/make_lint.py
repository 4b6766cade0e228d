"""Writes docs/reference/lint.md: the rules, and their accuracy on the fixtures.

`make docs` runs it. The rules come from the linter; expected.toml, beside the fixtures, lists what must be found.
"""

from __future__ import annotations

import datetime
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from embark.lint.check import lint_paths, lint_texts
from embark.lint.rule import Rule
from embark.lint.rules import ALL_RULES

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "lint"
EXAMPLE = FIXTURES / "guides" / "aws__option_a_using_torchrun_kubernetes_job_r.yaml"
AS_OF = datetime.date(2026, 11, 18)  # The day of the fixtures: support of the versions in them ends.
GROUPS = {
    "guides": "blocks of TorchRec's older deployment guides, unchanged",
    "accepted": "manifests that a Kubernetes API server accepted in strict mode",
    "faulty": "small files, each with one fault or a few",
    "good": "correct files, modelled on upstream's own examples",
}

HEAD = """# embark lint

A manifest can pass every schema and the API server, and still train nothing: an undefined `$(MASTER_ADDR)`, a missing
Service, a container with the wrong name, EFA devices that no pod requests, a handler that reports success when the
machine is preempted. `embark lint` finds such mistakes and says what will happen.

```bash
embark lint job.yaml                  # a file
embark lint deploy/                   # a folder: manifests, Dockerfiles, scripts, Python, requirements
embark lint deploy/ --fix             # apply the automatic fixes
embark lint deploy/ --select EMB4 --ignore EMB129 --json
```

Files are read together: a Job may name a Service of another file. A reference to an object in none of the files is a
warning, "not among the files given", since the object may exist elsewhere. The exit code is 1 if there are errors, and
0 if there are only warnings. `--select` and `--ignore` take a code, a name, or the beginning of a code: `EMB4` is all
of AWS.

It reads Kubernetes objects (Job, CronJob, JobSet, Pod, Deployment, PyTorchJob, TrainJob, RayJob, RayCluster, Kueue,
Service, InferenceService, Cloud Run, Azure ML, autoscalers, disruption budgets, volumes, NicClusterPolicy), eksctl's
cluster files, CloudFormation's FSx file systems, Vertex AI jobs in YAML and Python, Dockerfiles, shell scripts with
the manifests inside their here-documents, TorchX components, training code and requirements files. Nothing is
executed, no YAML tag is followed, and no network is used. Files above 2 MB, binary files, text that is not UTF-8, and
YAML with too much nesting or too many aliases are one finding each.

To accept a finding, add a comment on its line or directly above: `# embark-lint: ignore EMB129`, with the reason.

A fix edits the text in place; everything else, including comments, stays byte for byte. A file that a fix would make
unreadable is not changed.

## Example

The errors in the first Job of TorchRec's AWS guide:

"""

MEASURED = """## Accuracy

Every fixture under `tests/fixtures/lint` was linted alone, and the findings were compared with `expected.toml`, which
was written by hand. Each pair of file and rule counts once: right (a mistake, found), false alarm (no mistake, found)
or missed (a mistake, not found).

The rules were written with these files in view. The figures show that each listed mistake is caught and that good files
of these shapes pass; on files of other shapes both can be lower.

"""


@dataclass(slots=True)
class Score:
    """Pairs of file and rule."""

    num_right: int = 0
    num_false: int = 0
    num_missed: int = 0

    @property
    def precision(self) -> str:
        found = self.num_right + self.num_false
        return f"{self.num_right / found:.0%}" if found else "–"

    @property
    def recall(self) -> str:
        there = self.num_right + self.num_missed
        return f"{self.num_right / there:.0%}" if there else "–"


def page() -> str:
    by_rule, by_group = measure()
    lines = [HEAD + "```text", *_example(), "```", "", MEASURED + _groups(by_group), "", "## Rules", "",
             f"{len(ALL_RULES)} rules, {sum(rule.can_fix for rule in ALL_RULES)} of them with an automatic fix for the "
             "plain cases. The last three columns count the fixtures: right, false alarms, missed."]
    for title in dict.fromkeys(rule.group for rule in ALL_RULES):
        lines += ["", f"### {title}", "", "| code | name | level | fix | what will happen | source | | | |",
                  "|---|---|---|---|---|---|---|---|---|"]
        lines += [_line(rule, by_rule[rule.code]) for rule in ALL_RULES if rule.group == title]
    return "\n".join(lines) + "\n"


def measure() -> tuple[dict[str, Score], dict[str, tuple[int, Score]]]:
    """By rule; and by group of fixtures, with the number of files."""
    expected: Mapping[str, Mapping[str, list[str]]] = tomllib.loads((FIXTURES / "expected.toml").read_text())
    by_rule = {rule.code: Score() for rule in ALL_RULES}
    by_group: dict[str, tuple[int, Score]] = {}
    for group in GROUPS:
        files = sorted(path for path in (FIXTURES / group).iterdir())
        score = Score()
        for path in files:
            found = {finding.code for finding in lint_paths([path], today=AS_OF)}
            wanted = set(expected.get(group, {}).get(path.name, []))
            for code in found | wanted:
                for one in (score, by_rule[code]):
                    one.num_right += code in found and code in wanted
                    one.num_false += code in found and code not in wanted
                    one.num_missed += code in wanted and code not in found
        by_group[group] = len(files), score
    return by_rule, by_group


def _groups(by_group: Mapping[str, tuple[int, Score]]) -> str:
    lines = ["| fixtures | files | right | false alarms | missed | precision | recall |",
             "|---|---|---|---|---|---|---|"]
    total = Score()
    for group, (num_files, score) in by_group.items():
        lines.append(_score_line(f"`{group}`: {GROUPS[group]}", num_files, score))
        total.num_right += score.num_right
        total.num_false += score.num_false
        total.num_missed += score.num_missed
    lines.append(_score_line("**all**", sum(num for num, _ in by_group.values()), total))
    return "\n".join(lines)


def _score_line(title: str, num_files: int, score: Score) -> str:
    return (f"| {title} | {num_files} | {score.num_right} | {score.num_false} | {score.num_missed} | "
            f"{score.precision} | {score.recall} |")


def _line(rule: Rule, score: Score) -> str:
    fix = "yes" if rule.can_fix else ""
    host, happens = rule.source.split("/")[2], rule.happens.replace("|", "&#124;")
    return (f"| {rule.code} | {rule.name} | {rule.level} | {fix} | {happens} | "
            f"[{host}]({rule.source}) | {score.num_right} | {score.num_false} | {score.num_missed} |")


def _example() -> list[str]:
    findings = lint_texts({"torchrec-training-job.yaml": EXAMPLE.read_text()})
    lines = []
    for one in findings:
        if one.level == "error":
            lines += [f"{one.path}:{one.line}: error {one.code} {one.name}", f"    {one.what}",
                      f"    fix: {one.fix}"]
    return lines


if __name__ == "__main__":
    sys.stdout.write(page())
