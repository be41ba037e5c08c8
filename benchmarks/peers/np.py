"""NP (Zhou et al. 2023): three NP layers of 16, 16 and 5 channels with learned embeddings of inputs and outputs."""

from __future__ import annotations

from itertools import pairwise

from nfn.layers import HNPPool, NPLinear, TupleOp
from torch import nn

from benchmarks.peers.heads import accuracy_head
from benchmarks.peers.nfn_layers import Chain, network_spec
from magep_fast import WeightSpace

CHANNELS = (1, 16, 16, 5)


def build(space: WeightSpace) -> nn.Module:
    spec = network_spec(space)
    layers = [
        layer
        for d, e in pairwise(CHANNELS)
        for layer in (NPLinear(spec, in_channels=d, out_channels=e, io_embed=True), TupleOp(nn.ReLU()))
    ]
    pooled = CHANNELS[-1] * HNPPool.get_num_outs(spec)
    return Chain(space, [*layers, HNPPool(spec), nn.Flatten(), accuracy_head(pooled, hidden=1000)])
