"""Why a run failed or is slow: from its logs, events, manifests and spec to causes, each with its evidence and a fix.
May import launch and below."""

from embark.diagnose.report import Report, diagnose
from embark.diagnose.scan import Diagnosis, Evidence, Rule, load_rules
from embark.diagnose.source import DiagnosedFile, sources_of

__all__ = ["Diagnosis", "Evidence", "Report", "Rule", "DiagnosedFile", "diagnose", "load_rules", "sources_of"]
