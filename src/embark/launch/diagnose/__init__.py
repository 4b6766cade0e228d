"""What went wrong with a run: from its logs, events, manifests and spec to causes, each with its evidence and a fix."""

from embark.launch.diagnose.diagnose import Report, diagnose
from embark.launch.diagnose.finding import Diagnosis, Evidence
from embark.launch.diagnose.rule import Rule, load_rules
from embark.launch.diagnose.source import Source, sources_of

__all__ = ["Diagnosis", "Evidence", "Report", "Rule", "Source", "diagnose", "load_rules", "sources_of"]
