"""An Azure subscription: `az`, AKS, storage, identities, networks and machines."""

from pathlib import Path

from cloudsim.account import Account
from cloudsim.azure.arm import Subscription
from cloudsim.azure.blob_server import serve_blobs
from cloudsim.azure.program import Az
from cloudsim.azure.storage import AzureRegistry
from cloudsim.programs import add_common_programs


def open_account(folder: Path) -> Account:
    """Open an empty subscription that is logged in and has quota for any machine."""
    account = Account("azure", folder)
    subscription = Subscription(account)
    account.registry = AzureRegistry(subscription)
    account.add_programs([Az(subscription)])
    add_common_programs(account)
    account.environment |= {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": serve_blobs(subscription)}
    return account
