"""HNP (Zhou et al. 2023): three HNP layers of 16, 16 and 5 channels."""

from __future__ import annotations

from nfn.layers import HNPLinear
from torch import nn

from benchmarks.peers.nfn_layers import accuracy_network
from magep_fast import WeightSpace


def build(space: WeightSpace) -> nn.Module:
    return accuracy_network(space, HNPLinear)
