"""The server of an account whose only cluster was made by someone else: `python existing_account.py CLOUD FOLDER`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from integration.account.existing_cluster import existing_cluster

from cloudsim import server

if __name__ == "__main__":
    server.open_account = lambda _, folder: existing_cluster(folder).account
    server.main(*sys.argv[1:])
