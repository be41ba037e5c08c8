"""A stand-in for the MAGEP authors' layers: their parameter names, shapes and equations, every term materialised."""

from dataclasses import dataclass

import torch
from torch import einsum, nn


class WeightSpaceFeatures:
    """Weights `[B, C, n_i, n_(i-1)]`, or with `kh, kw` behind, and biases `[B, C, n_i]`."""

    def __init__(self, weights, biases):
        self.weights, self.biases = tuple(weights), tuple(biases)

    def __len__(self):
        return len(self.weights)

    def __getitem__(self, i):
        return self.weights[i], self.biases[i]


@dataclass(frozen=True)
class ArraySpec:
    shape: tuple[int, ...]


@dataclass(frozen=True)
class NetworkSpec:
    weight_spec: list[ArraySpec]
    bias_spec: list[ArraySpec]

    def __len__(self):
        return len(self.weight_spec)

    @staticmethod
    def of(widths, kernels=None):
        kernels = kernels or [()] * (len(widths) - 1)
        return NetworkSpec(
            [ArraySpec((n, m, *k)) for m, n, k in zip(widths, widths[1:], kernels, strict=False)],
            [ArraySpec((n,)) for n in widths[1:]],
        )

    def ends(self):
        return self.weight_spec[0].shape[1], self.weight_spec[-1].shape[0]

    def taps(self):
        return [torch.Size(x.shape[2:]).numel() for x in self.weight_spec]


class TupleOp(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x):
        return WeightSpaceFeatures([self.op(w) for w in x.weights], [self.op(b) for b in x.biases])

    def __repr__(self):
        return f"TupleOp({self.op})"


class Coefficient(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(shape))


def as_matrices(x):
    """Taps join the channels, the channel outermost."""
    return [w if w.dim() == 4 else w.permute(0, 1, 4, 5, 2, 3).flatten(1, 3) for w in x.weights]


def as_kernels(weights, biases, kernels):
    shaped = []
    for w, k in zip(weights, kernels, strict=True):
        shaped.append(w.unflatten(1, (-1, *k)).permute(0, 1, 4, 5, 2, 3) if k else w)
    return WeightSpaceFeatures(shaped, biases)


class Mixer(nn.Module):
    def __init__(self, network_spec, in_channels, out_channels):
        super().__init__()
        self.network_spec = network_spec
        self.L = len(network_spec)
        self.n_0, self.n_L = network_spec.ends()
        self.d, self.e = in_channels, out_channels

    def psi(self, rows, trained):
        return nn.Parameter(0.3 * torch.randn(self.d, rows, self.n_L), requires_grad=trained)

    def coefficient(self, name, *shape):
        setattr(self, name, Coefficient(self.e, self.d, *shape))

    def products(self, x):
        """W[s, t] = W_s … W_(t+1) and b[t], counted from 1 as in the paper."""
        W = {(i, i - 1): w for i, w in enumerate(as_matrices(x), start=1)}
        for s in range(1, self.L + 1):
            for t in range(s - 2, -1, -1):
                W[s, t] = W[s, t + 1] @ W[t + 1, t]
        return W, dict(enumerate(x.biases, start=1))

    def Wb(self, W, b, i):
        return sum(einsum("bdij,bdj->bdi", W[i, t], b[t]) for t in range(1, i))

    def traces(self, W, b):
        WW = [
            einsum("bdiq,dqp,bdpi->bd", W[s, 0], self.Psi_s_0_L_s[f"{s}_{s}"], W[self.L, s]) for s in range(1, self.L)
        ]
        bW = [einsum("bdi,dzp,bdpi->bd", b[s], self.Psi_s_L_s[f"{s}_{s}"], W[self.L, s]) for s in range(1, self.L)]
        return torch.stack(WW, dim=2), torch.stack(bW, dim=2)


class HNPSMixerLinear(Mixer):
    def __init__(self, network_spec, in_channels, out_channels):
        super().__init__(network_spec, in_channels, out_channels)
        L, n_0, n_L = self.L, self.n_0, self.n_L
        pairs = [f"{s}_{t}" for s in range(1, L + 1) for t in range(s)]
        traces = [f"{s}_{s}" for s in range(1, L)]
        self.Psi_s_0_L_t = nn.ParameterDict({pair: self.psi(n_0, False) for pair in pairs})
        self.Psi_s_L_t = nn.ParameterDict({pair: self.psi(1, False) for pair in pairs})
        self.Psi_s_0_L_s = nn.ParameterDict({pair: self.psi(n_0, False) for pair in traces})
        self.Psi_s_L_s = nn.ParameterDict({pair: self.psi(1, False) for pair in traces})
        for i in range(L - 1):
            square, row = ((n_0, n_0), (n_0,)) if i == 0 else ((), (n_0,))
            for term in ("W", "WW", "bW"):
                self.coefficient(f"layer_{i}_W_{term}", *square)
                self.coefficient(f"layer_{i}_b_{term}", *row)
            self.coefficient(f"layer_{i}_b_b")
            if i == 0:
                self.coefficient("layer_0_W_b", n_0)
            else:
                self.coefficient(f"layer_{i}_b_Wb")
        last = f"layer_{L - 1}"
        for term in ("W", "WW", "bW"):
            self.coefficient(f"{last}_W_{term}", n_L, n_L)
        for term in ("WW_L0L0", "W", "bW_LL0"):
            self.coefficient(f"{last}_b_{term}", n_L, n_0, n_L)
        for term in ("Wb", "b_L"):
            self.coefficient(f"{last}_b_{term}", n_L, n_L)
        for term in ("WW_0L", "bW_L"):
            self.coefficient(f"{last}_b_{term}", L - 1, n_L)
        setattr(self, f"{last}_b", Coefficient(out_channels, n_L))

    def forward(self, x):
        W, b = self.products(x)
        L = self.L

        def WW(s, t):
            return W[s, 0] @ self.Psi_s_0_L_t[f"{s}_{t}"] @ W[L, t]

        def bW(s, t):
            return b[s].unsqueeze(-1) @ self.Psi_s_L_t[f"{s}_{t}"] @ W[L, t]

        def apply(equation, name, data):
            return einsum(equation, getattr(self, name).weight, data)

        weights, biases = [], []
        for i in range(1, L + 1):
            square = "edpj,bdpk->bejk" if i == L else "edqk,bdjq->bejk" if i == 1 else "ed,bdjk->bejk"
            name = f"layer_{i - 1}"
            weight = apply(square, f"{name}_W_W", W[i, i - 1])
            weight = weight + apply(square, f"{name}_W_WW", WW(i, i - 1)) + apply(square, f"{name}_W_bW", bW(i, i - 1))
            if i == 1:
                weight = weight + apply("edk,bdj->bejk", "layer_0_W_b", b[1]).expand_as(weight)
            weights.append(weight)
            if i < L:
                row = "edq,bdjq->bej"
                bias = apply(row, f"{name}_b_W", W[i, 0]) + apply(row, f"{name}_b_WW", WW(i, 0))
                bias = bias + apply(row, f"{name}_b_bW", bW(i, 0)) + apply("ed,bdj->bej", f"{name}_b_b", b[i])
                if i > 1:
                    bias = bias + apply("ed,bdj->bej", f"{name}_b_Wb", self.Wb(W, b, i))
            else:
                both = "edpqj,bdpq->bej"
                bias = apply(both, f"{name}_b_WW_L0L0", WW(L, 0)) + apply(both, f"{name}_b_W", W[L, 0])
                bias = bias + apply(both, f"{name}_b_bW_LL0", bW(L, 0))
                bias = bias + apply("edpj,bdp->bej", f"{name}_b_Wb", self.Wb(W, b, L))
                bias = bias + apply("edpj,bdp->bej", f"{name}_b_b_L", b[L])
                WW_pp, bW_pp = self.traces(W, b)
                bias = bias + apply("edlj,bdl->bej", f"{name}_b_WW_0L", WW_pp)
                bias = bias + apply("edlj,bdl->bej", f"{name}_b_bW_L", bW_pp)
                bias = bias + getattr(self, f"{name}_b").weight
            biases.append(bias)
        return type(x)(*_parts(as_kernels(weights, biases, [w.shape[4:] for w in x.weights])))


class HNPSMixerInv(Mixer):
    def __init__(self, network_spec, in_channels, out_channels):
        super().__init__(network_spec, in_channels, out_channels)
        L, n_0, n_L = self.L, self.n_0, self.n_L
        self.Psi_s_0_L_t, self.Psi_s_L_t = self.psi(n_0, True), self.psi(1, True)
        self.Psi_s_0_L_s = nn.ParameterDict({f"{s}_{s}": self.psi(n_0, True) for s in range(1, L)})
        self.Psi_s_L_s = nn.ParameterDict({f"{s}_{s}": self.psi(1, True) for s in range(1, L)})
        for term in ("WW", "W", "bW"):
            self.coefficient(f"layer_{term}", n_L, n_0)
        for term in ("Wb", "b"):
            self.coefficient(f"layer_{term}", n_L)
        for term in ("WW_pp", "bW_pp"):
            self.coefficient(f"layer_{term}", L - 1)
        self.tau_weight = nn.Parameter(torch.randn(out_channels))

    def forward(self, x):
        W, b = self.products(x)
        product, L = W[self.L, 0], self.L
        WW = product @ self.Psi_s_0_L_t @ product
        bW = b[L].unsqueeze(-1) @ self.Psi_s_L_t @ product
        WW_pp, bW_pp = self.traces(W, b)
        both, row = "edpq,bdpq->be", "edp,bdp->be"
        return (
            einsum(both, self.layer_WW.weight, WW)
            + einsum(both, self.layer_W.weight, product)
            + einsum(both, self.layer_bW.weight, bW)
            + einsum(row, self.layer_Wb.weight, self.Wb(W, b, L))
            + einsum(row, self.layer_b.weight, b[L])
            + einsum("edl,bdl->be", self.layer_WW_pp.weight, WW_pp)
            + einsum("edl,bdl->be", self.layer_bW_pp.weight, bW_pp)
            + self.tau_weight
        )


class HNPSLinear(nn.Module):
    def __init__(self, in_network_spec, out_network_spec, in_channels, out_channels):
        super().__init__()
        self.in_network_spec, self.out_network_spec = in_network_spec, out_network_spec
        self.L, d, e = len(in_network_spec), in_channels, out_channels
        n_0, n_L = in_network_spec.ends()
        for i, (f_in, f_out) in enumerate(zip(in_network_spec.taps(), out_network_spec.taps(), strict=True)):
            last = i == self.L - 1
            square = (n_0, n_0) if i == 0 else (n_L, n_L) if last else ()
            setattr(self, f"layer_{i}_Y_W", Coefficient(e * f_out, d * f_in, *square))
            setattr(self, f"layer_{i}_z_b", Coefficient(e, d, *((n_L, n_L) if last else ())))
            if i == 0:
                self.layer_0_Y_b = Coefficient(e * f_out, d, n_0)
                self.layer_0_z_W = Coefficient(e, d * f_in, n_0)
            if last:
                setattr(self, f"layer_{i}_z_tau", Coefficient(e, n_L))

    def forward(self, x):
        weights, biases = [], []
        for i, (w, b) in enumerate(zip(as_matrices(x), x.biases, strict=True)):
            last = i == self.L - 1
            Y_W, z_b = getattr(self, f"layer_{i}_Y_W").weight, getattr(self, f"layer_{i}_z_b").weight
            if i == 0:
                weight = einsum("mnqk,bnjq->bmjk", Y_W, w)
                weight = weight + einsum("mnk,bnj->bmjk", self.layer_0_Y_b.weight, b)
                bias = einsum("mnq,bnjq->bmj", self.layer_0_z_W.weight, w) + einsum("mn,bnj->bmj", z_b, b)
            elif last:
                weight = einsum("mnpj,bnpk->bmjk", Y_W, w)
                bias = einsum("mnpj,bnp->bmj", z_b, b) + getattr(self, f"layer_{i}_z_tau").weight
            else:
                weight, bias = einsum("mn,bnjk->bmjk", Y_W, w), einsum("mn,bnj->bmj", z_b, b)
            weights.append(weight)
            biases.append(bias)
        kernels = [s.shape[2:] for s in self.out_network_spec.weight_spec]
        return type(x)(*_parts(as_kernels(weights, biases, kernels)))


def _parts(x):
    return x.weights, x.biases
