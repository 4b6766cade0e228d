"""`torchx run`: the real TorchX makes its request, and the cluster of the account receives it."""

import subprocess
import sys
from itertools import pairwise

import yaml

from cloudsim.account import Account, AnsweredBy, Call
from cloudsim.kubernetes.admission import apply
from cloudsim.state import Refusal

REQUEST = "=== SCHEDULER REQUEST ==="
LIMIT_S = 120.0
CONFIG = ("-cfg", "--scheduler_args")


class TorchX:
    name = "torchx"
    answered_by: AnsweredBy = "real"

    def __init__(self, account: Account) -> None:
        self._account = account

    def run(self, call: Call) -> str:
        if call.words[:1] != ("run",):
            raise Refusal(f"torchx {' '.join(call.words[:1])} is not modelled by the simulated account")
        # TorchX would validate the request at an API server; `apply` does so here.
        given = [f"{word},validate_spec=False" if before in CONFIG else word
                 for before, word in pairwise(("", *call.words[1:]))]
        words = [sys.executable, "-m", "torchx.cli.main", "run", "--dryrun", *given]
        done = subprocess.run(words, cwd=call.folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
                              env={**call.env, "PATH": call.env.get("PATH", "")})
        if done.returncode != 0:
            raise Refusal(done.stderr.strip() or done.stdout.strip(), done.returncode)
        cluster = self._account.cluster()
        if not any(kind.key == "VolcanoJob" for kind in cluster.kinds()):
            raise Refusal("kubernetes.client.exceptions.ApiException: (404)\nReason: Not Found: the server could not "
                          "find the requested resource batch.volcano.sh/v1alpha1 jobs: Volcano is not installed")
        request = yaml.safe_load(done.stdout.partition(REQUEST)[2])
        space = _option(call.words, "namespace") or "default"
        request["metadata"]["namespace"] = space
        said = apply(cluster, request, "torchx", create=True)
        return f"{said}\nkubernetes://torchx/{space}:{request['metadata']['name']}\n"


def _option(words: tuple[str, ...], name: str) -> str:
    """Return a value of `-cfg a=b,c=d`."""
    for before, word in pairwise(words):
        if before in CONFIG:
            return dict(one.split("=", 1) for one in word.split(",") if "=" in one).get(name, "")
    return ""
