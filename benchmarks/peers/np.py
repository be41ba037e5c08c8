"""NP (Zhou et al. 2023): three NP layers of 16, 16 and 5 channels with learned embeddings of inputs and outputs."""

from __future__ import annotations

from functools import partial

from nfn.layers import NPLinear
from torch import nn

from benchmarks.peers.nfn_layers import accuracy_network
from magep_fast import WeightSpace


def build(space: WeightSpace) -> nn.Module:
    return accuracy_network(space, partial(NPLinear, io_embed=True))
