"""The guide of the quickstart runs as written: here, and in a cluster that a cloud's guide has set up."""

from __future__ import annotations

import re

import pytest
from integration.account.guide import WarmSession, copy_of_clone, read_guide, walk

pytestmark = pytest.mark.slow

SKIPS = {
    "python3 -m venv": "the environment under test is there already",
    "pip install": "the environment under test is there already",
    "grep -v": "writes what only the next pip install reads",
    "python train_torchrec_quickstart.py": "minutes on a CPU: tests/unit/test_quickstart_script.py runs it in small",
    "torchrun": "four GPUs: tests/unit/test_quickstart_script.py runs two ranks on the CPU",
    "docker run": "tests/integration/cloud/test_image.py runs these in a real container",
}
CLUSTERS = {
    "aws": ("eks_cluster.sh", ["Before you begin", "Step 1: names", "Step 2: the image"]),
    "azure": ("aks_cluster.sh", ["Before you begin", "Step 1: names", "Step 2: the image"]),
    "gcp": ("gke_cluster.sh", ["Before you begin", "Step 1: names", "Step 2: the image"]),
}


@pytest.mark.parametrize("cloud", CLUSTERS)
def test_the_quickstart_runs_in_the_cluster_of_a_cloud_s_guide(cloud: str, tmp_path, warm_ray_python):
    clone, account = tmp_path / "clone", tmp_path / "account"
    account.mkdir()
    tree = copy_of_clone(clone) / "examples" / "cloud_deployment"
    script, sections = CLUSTERS[cloud]
    others = {f"embark render run.toml --set place.cloud={other}": "another cloud" for other in CLUSTERS
              if other != cloud}
    with WarmSession(cloud, account, warm_ray_python) as session:
        walk(session, read_guide(tree / cloud / "README.md"), tree / cloud, sections=sections,
             skips={"pip install": "the environment under test is there already"})
        for line in ("./storage.sh buckets", f"./{script} up --yes", f"./{script} machines --yes"):
            done = session.bash(line, tree / cloud)
            assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}"
        session.bash(f"cd {tree / 'quickstart'}", tree)
        walked = walk(session, read_guide(tree / "quickstart" / "README.md"), tree / "quickstart",
                      skips={**SKIPS, **others})
    assert "job/torchrec-quickstart condition met" in walked.output
    # torchrun decides which of them is the first, whose log the run is.
    assert re.search(r"\[pod/torchrec-quickstart-[01]", walked.output), "the selector of the guide finds the pods"
