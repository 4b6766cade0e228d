"""Versions that a log names, compared with those that work together."""

import re
from collections.abc import Iterator

from embark.diagnose.finding import Evidence, RuleMatch
from embark.diagnose.rule import rule_named
from embark.diagnose.scan import Listener
from embark.stack.versions import check

_PINNED = re.compile(
    r"(?<![\w-])(torchrec|torch|fbgemm[-_]gpu(?:[-_]cpu)?)(?:==|-)(\d+\.\d+(?:\.\d+)?(?:\+\w+)?)(?![\w.])"
)


class Versions:
    """Collects what pip installed, or found installed."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, Evidence]] = {}

    @property
    def listeners(self) -> tuple[Listener, ...]:
        return ((b"successfully installed", self._read), (b"torch==", self._read), (b"torchrec==", self._read),
                (b"fbgemm-gpu", self._read), (b"fbgemm_gpu", self._read))

    def findings(self) -> Iterator[RuleMatch]:
        """Only where two or more of the three are known, and they are incompatible."""
        here: dict[str, str | None] = {name: version for name, (version, _) in self._found.items()}
        if "torch" not in here or len(here) < 2:
            return
        wrong = [finding for finding in check(here, gpu="fbgemm-gpu" in here)
                 if not finding.ok and finding.found is not None and finding.name in here]
        if not wrong:
            return
        have = ", ".join(f"{name} {version}" for name, version in here.items())
        better = "; ".join(f"{finding.name} {finding.expected}" for finding in wrong)
        pins = " ".join(f"{finding.name}=={finding.expected.partition(',')[0].split()[-1]}" for finding in wrong)
        last = max((evidence for _, evidence in self._found.values()), key=lambda evidence: evidence.order)
        cause = f"{have} do not work together: expected {better}"
        yield RuleMatch(rule_named("versions-do-not-match"), last, cause=cause, command=f"pip install {pins}")

    def _read(self, text: str, evidence: Evidence) -> None:
        if "Requirement already" in text or "Collecting " in text or "requires " in text:
            return
        for found in _PINNED.finditer(text):
            self._found[found[1].replace("_", "-")] = found[2], evidence
