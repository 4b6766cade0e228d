"""An Azure subscription: `az`, AKS, storage, identities, networks and machines."""

from pathlib import Path

from cloudsim.account import Account
from cloudsim.azure.arm import Subscription
from cloudsim.azure.blob_server import serve_blobs
from cloudsim.azure.program import Az
from cloudsim.azure.storage import AzureRegistry
from cloudsim.programs import add_common_programs

NOT_MODELLED = (
    "Azure: capacity of a zone; machines are limited by quota alone",
    "Azure: the minutes until a role assignment is effective; here it is at once",
    "Azure: permissions of the user, who owns the subscription",
    "Azure: peered networks, firewalls, private endpoints and policies",
    "Azure: programs on plain machines; `vm.sh logs` shows whether they reach the image and the storage",
    "Azure: alerts and budgets, which exist and never fire",
    "Azure: conflicts between the drivers of a node's image and of NVIDIA's operators",
    "Azure: the registration of providers that az registers by itself",
)


def open_account(folder: Path) -> Account:
    """Open an empty subscription that is logged in and has quota for any machine."""
    account = Account("azure", folder)
    subscription = Subscription(account)
    account.registry = AzureRegistry(subscription)
    account.add_programs([Az(subscription)])
    add_common_programs(account)
    account.environment |= {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": serve_blobs(subscription)}
    account.not_modelled += NOT_MODELLED
    return account
