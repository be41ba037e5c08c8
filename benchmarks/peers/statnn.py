"""STATNN (Unterthiner et al. 2020): mean, variance and quantiles of every weight matrix and bias into an MLP."""

from __future__ import annotations

from nfn.layers import StatFeaturizer
from torch import nn

from benchmarks.peers.heads import accuracy_head
from benchmarks.peers.nfn_layers import Chain, network_spec
from magep_fast import WeightSpace


def build(space: WeightSpace) -> nn.Module:
    statistics = StatFeaturizer.get_num_outs(network_spec(space))
    return Chain(space, [StatFeaturizer(), nn.Flatten(), accuracy_head(statistics, hidden=1000)])
