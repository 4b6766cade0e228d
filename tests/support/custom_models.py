"""Files with a custom model."""

from pathlib import Path

import embark

AUTOINT = (Path(embark.__file__).parent / "trainers" / "torch" / "starter_model.py").read_text()
DLRM = """
import torch
from embark.trainers.torch.networks.dlrm import DotNetwork

class MyModel(DotNetwork):
    def forward(self, dense, pooled):
        return super().forward(dense, torch.cat(list(pooled.values()), dim=1))
"""
STATEFUL = """
import torch
from torch import nn

class MyModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        width = model.num_dense + sum(t.dim for t in model.table_list())
        self.unused, self.frozen = nn.Linear(2, 2), nn.Parameter(torch.ones(1), requires_grad=False)
        self.layers = nn.Sequential(nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1))

    def forward(self, dense, pooled):
        return self.layers(torch.cat([dense, *pooled.values()], dim=1)) * self.frozen
"""
SIMPLE = """
import torch
from torch import nn

class MyModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.layer = nn.Linear(model.num_dense, 1)

    def forward(self, dense, pooled):
        x = self.layer(dense)
        {line}
"""
KIND = "model.kind=my_model:MyModel"
