"""The dense layers of every kind of model, which training, export and scoring share. torch alone, no TorchRec."""

from torch import nn

from embark.spec.model import ModelSpec
from .custom_model import CustomNetwork
from .dlrm import CrossNetwork, DotNetwork
from .field_networks import FIELD_NETWORKS
from .sequences import sequence_network
from .two_tower import TwoTowerNetwork


def dense_network(model: ModelSpec) -> nn.Module:
    """Return the part of a model that every rank holds whole."""
    if model.is_custom:
        return CustomNetwork(model)
    if model.has_sequences:
        return sequence_network(model)
    if model.kind == "two_tower":
        return TwoTowerNetwork(model)
    return {**FIELD_NETWORKS, "dcnv2": CrossNetwork, "dlrm": DotNetwork}[model.kind](model)
