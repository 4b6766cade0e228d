"""A subscription of Azure that remembers: `az`, AKS, storage, identities, networks and machines."""

from pathlib import Path

from cloudsim.account import Account
from cloudsim.azure.arm import Subscription
from cloudsim.azure.blob_server import serve_blobs
from cloudsim.azure.program import Az
from cloudsim.azure.storage import AzureRegistry
from cloudsim.programs import add_common_programs

NOT_MODELLED = (
    "Azure: no machine runs out of capacity, only of quota.",
    "Azure: a role assignment is effective at once; in reality it takes minutes.",
    "Azure: the owner of the subscription is logged in; no command lacks a permission.",
    "Azure: peered networks, firewalls, private endpoints and policies are not known.",
    "Azure: programs on plain machines are not run; vm.sh logs says whether image and storage can be reached.",
    "Azure: alerts and budgets exist, and never fire.",
    "Azure: drivers in a node's image and in NVIDIA's operators are not compared.",
)


def open_account(folder: Path) -> Account:
    """An empty subscription, logged in, with quota for any machine."""
    account = Account("azure", folder)
    subscription = Subscription(account)
    account.registry = AzureRegistry(subscription)
    account.add_programs([Az(subscription)])
    add_common_programs(account)
    account.environment |= {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": serve_blobs(subscription)}
    account.not_modelled += NOT_MODELLED
    return account
