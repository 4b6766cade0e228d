"""The server of an account whose only cluster was made by someone else: `python existing_account.py CLOUD FOLDER`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from account_faults import let_faults_happen
from integration.account.existing_cluster import existing_cluster

from cloudsim import server
from cloudsim.account import Account


def open_account(_: str, folder: Path) -> Account:
    account = existing_cluster(folder).account
    let_faults_happen(account)
    return account


if __name__ == "__main__":
    server.open_account = open_account
    server.main(*sys.argv[1:])
