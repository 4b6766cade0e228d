"""Why a run failed or is slow: from its logs, events, manifests and spec to causes, each with its evidence and a fix.
May import launch and below."""
