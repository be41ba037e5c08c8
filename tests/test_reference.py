"""The reference against the paper's formulas, written out once more with explicit sums for a single network."""

from functools import partial

import numpy as np
import pytest
import torch

from magep_fast import MagepEquivariant, MagepInvariant, WeightFeatures, WeightSpace
from magep_fast.reference import StableTerms
from tests.helpers import assert_same, random_features

SPACES = [WeightSpace(widths) for widths in ((2, 4, 3), (2, 5, 4, 3), (3, 2, 5, 4, 2))]


class NetworkTerms:
    """The stable polynomial terms of one channel of one network."""

    def __init__(self, layer, features, channel):
        self.layer, self.channel, self.L = layer, channel, features.num_layers
        self.weights = [w[0, channel].numpy() for w in features.weights]
        self.biases = [b[0, channel].numpy() for b in features.biases]

    def b(self, s):
        return self.biases[s - 1]

    def W(self, s, t):
        product = np.eye(self.weights[t].shape[1])
        for i in range(t + 1, s + 1):
            product = self.weights[i - 1] @ product
        return product

    def Wb(self, s, t):
        return self.W(s, t) @ self.b(t)

    def connection(self, kind, s, t):
        return self.layer.connection(kind, s, t)[self.channel].detach().numpy()

    def WW(self, s, t):
        return self.W(s, 0) @ self.connection("WW", s, t) @ self.W(self.L, t)

    def bW(self, s, t):
        return np.outer(self.b(s), self.connection("bW", s, t)) @ self.W(self.L, t)


def readout_entry(terms, phi):
    """The sums over all invariants but the constant: an entry of the last bias, or of the invariant layer."""
    L, n_L, n_0 = terms.L, terms.W(terms.L, 0).shape[0], terms.W(terms.L, 0).shape[1]
    total = 0.0
    for p in range(n_L):
        for q in range(n_0):
            total += phi("WW")[p, q] * terms.WW(L, 0)[p, q]
            total += phi("W_prod")[p, q] * terms.W(L, 0)[p, q]
            total += phi("bW")[p, q] * terms.bW(L, 0)[p, q]
        total += phi("b")[p] * terms.b(L)[p]
        for t in range(1, L):
            total += phi("Wb")[t - 1, p] * terms.Wb(L, t)[p]
    for s in range(1, L):
        for p in range(len(terms.b(s))):
            total += phi("WW_pp")[s - 1] * terms.WW(s, s)[p, p]
            total += phi("bW_pp")[s - 1] * terms.bW(s, s)[p, p]
    return total


def weight_entry(terms, phi, i, j, k):
    L = terms.L
    W, WW, bW = terms.W(i, i - 1), terms.WW(i, i - 1), terms.bW(i, i - 1)
    if i == L:
        return sum(
            phi("W")[p, j] * W[p, k] + phi("WW")[p, j] * WW[p, k] + phi("bW")[p, j] * bW[p, k]
            for p in range(W.shape[0])
        )
    if i == 1:
        return phi("b")[k] * terms.b(1)[j] + sum(
            phi("W")[q, k] * W[j, q] + phi("WW")[q, k] * WW[j, q] + phi("bW")[q, k] * bW[j, q]
            for q in range(W.shape[1])
        )
    return phi("W") * W[j, k] + phi("WW") * WW[j, k] + phi("bW") * bW[j, k]


def hidden_bias_entry(terms, phi, i, j):
    own = "W" if i == 1 else "W_prod"
    total = phi("b") * terms.b(i)[j]
    for q in range(terms.W(i, 0).shape[1]):
        total += phi(own)[q] * terms.W(i, 0)[j, q]
        total += phi("WW")[q] * terms.WW(i, 0)[j, q]
        total += phi("bW")[q] * terms.bW(i, 0)[j, q]
    return total + sum(phi("Wb")[t - 1] * terms.Wb(i, t)[j] for t in range(1, i))


def naive_equivariant(layer, features):
    L, out_channels = features.num_layers, layer.table.out_channels
    channels = [NetworkTerms(layer, features, d) for d in range(features.channels)]
    weights = [np.zeros((1, out_channels, *w.shape[2:])) for w in features.weights]
    biases = [np.zeros((1, out_channels, b.shape[2])) for b in features.biases]
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True), start=1):
        for (_, e, j), _ in np.ndenumerate(bias):
            for d, terms in enumerate(channels):

                def phi(term, output, index=(e, d), i=i):
                    return layer.coefficient(term, i, output).detach().numpy()[index]

                for k in range(weight.shape[3]):
                    weight[0, e, j, k] += weight_entry(terms, partial(phi, output="weight"), i, j, k)
                if i < L:
                    bias[0, e, j] += hidden_bias_entry(terms, partial(phi, output="bias"), i, j)
                else:
                    bias[0, e, j] += readout_entry(terms, partial(phi, output="bias", index=(e, d, ..., j)))
            if i == L:
                bias[0, e, j] += layer.coefficient("1", L, "bias")[e, j].item()
    return WeightFeatures(map(torch.from_numpy, weights), map(torch.from_numpy, biases))


def naive_invariant(layer, features):
    output = np.zeros((1, layer.table.out_channels))
    for e in range(layer.table.out_channels):
        for d in range(features.channels):

            def phi(term, index=(e, d)):
                return layer.coefficient(term).detach().numpy()[index]

            output[0, e] += readout_entry(NetworkTerms(layer, features, d), phi)
        output[0, e] += layer.coefficient("1")[e].item()
    return torch.from_numpy(output)


@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize(("kind", "naive"), [(MagepEquivariant, naive_equivariant), (MagepInvariant, naive_invariant)])
def test_layer_is_the_formula_of_the_paper(space, kind, naive):
    layer = kind(space, 2, 3, backend="reference", dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    features = random_features(space, channels=2, batch_size=1)
    assert_same(layer(features), naive(layer, features), 1e-12)


def test_traces_are_sums_of_diagonals():
    space = SPACES[1]
    layer = MagepInvariant(space, 2, 1, dtype=torch.float64)
    features = random_features(space, channels=2, batch_size=1)
    stable = StableTerms(features.weights, features.biases, layer.table.connections(layer.psi))
    for d in range(2):
        terms = NetworkTerms(layer, features, d)
        for s in range(1, space.num_layers):
            for found, matrix in ((stable.WW_pp(), terms.WW(s, s)), (stable.bW_pp(), terms.bW(s, s))):
                assert found[0, d, s - 1].item() == pytest.approx(np.trace(matrix), abs=1e-12)
