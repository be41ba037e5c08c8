"""Networks in and out of weight space, each way and back without changing a number.

| networks as | in | out |
|---|---|---|
| `nn.Module`, one or many | `from_modules` | `to_modules` writes into modules |
| `state_dict`, one or many | `from_state_dicts` | `to_state_dicts` |
| safetensors files | `from_safetensors` | `to_safetensors` |
| features of nfn and code built on it | `from_nfn` | `to_nfn` |
| weights and biases of DWSNets | `from_dwsnets` | `to_dwsnets` |
| rows of the Small CNN Zoo | `from_zoo_rows` | `to_zoo_rows` |

A layer without bias counts as one with a zero bias, and goes out without one again. BatchNorm is folded into the layer
in front of it; going out, that layer gets the folded numbers and the BatchNorm becomes the identity.
"""

from __future__ import annotations

import ast
import csv
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from math import prod
from os import PathLike, fspath
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from magep_fast.spaces import ChainedLayer, Norm, WeightFeatures, WeightSpace, chained_layers

StateDict: TypeAlias = Mapping[str, Tensor]
Keys: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None]
File: TypeAlias = str | PathLike[str]

_ROLES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_ORDER = "magep_fast.keys"  # in the metadata of files written here: all keys, in order of the layers


def from_modules(modules: nn.Module | Iterable[nn.Module]) -> WeightFeatures:
    """A batch of networks of one architecture as features of one channel.

    Kernel positions (taps) join the channel dimension: a convolution `[n_i, n_(i-1), kh, kw]` becomes
    `[kh·kw, n_i, n_(i-1)]`, as does a dense layer that reads a flattened feature map. The result is detached
    and does not share memory with the modules.
    """
    networks = [modules] if isinstance(modules, nn.Module) else list(modules)
    return _pack("from_modules", [chained_layers(network) for network in networks])


def to_modules(features: WeightFeatures, modules: nn.Module | Iterable[nn.Module]) -> None:
    """Writes features of one channel into the networks, in place: the inverse of `from_modules`.

    A layer used in several places takes equal features only.
    """
    networks = [modules] if isinstance(modules, nn.Module) else list(modules)
    _unpack(features, [chained_layers(network) for network in networks], "modules")


def from_state_dicts(
    state_dicts: StateDict | Iterable[StateDict],
    *,
    keys: Keys | None = None,
    layers: Sequence[str] | None = None,
    eps: float | None = None,
) -> WeightFeatures:
    """A batch of networks of one architecture, given by their state_dicts, as features of one channel.

    A 2-D weight is a dense layer, one of more dimensions a convolution; entries with running statistics are a
    BatchNorm. A dense layer behind a convolution may read a flattened feature map.

    Args:
        state_dicts: one or many, with keys `<layer>.weight`, `<layer>.bias`.
        keys: what foreign keys mean: a mapping or a function from the key to `"<layer>.weight"` and so on, or to None
            for an entry to leave out. Keys that a mapping does not have stand for themselves.
        layers: names of the layers from input to output, BatchNorm included, if the order of the keys is another one.
        eps: of all BatchNorms. A state_dict does not hold it; without it torch's default, 1e-5, is assumed, with a
            warning if there is a BatchNorm.
    """
    networks = [state_dicts] if isinstance(state_dicts, Mapping) else list(state_dicts)
    return _pack("from_state_dicts", _each("network", networks, lambda x: _layers_of(x, keys, layers, eps)))


def to_state_dicts(
    features: WeightFeatures,
    like: StateDict | Iterable[StateDict] | None = None,
    *,
    keys: Keys | None = None,
    layers: Sequence[str] | None = None,
    eps: float | None = None,
) -> list[dict[str, Tensor]]:
    """A state_dict for each network: the inverse of `from_state_dicts`.

    Args:
        features: of one channel.
        like: the state_dict, or one for each network, whose keys, shapes and further entries the results have. It is
            not changed. Without it layers are called `0`, `1`, …, with kernels of one dimension where there are taps.
        keys, layers, eps: as for `from_state_dicts`, about `like`.
    """
    if like is None:
        like = _plain_state_dict(features)
    templates = [like] * features.batch_size if isinstance(like, Mapping) else list(like)
    copies = [_clone(template) for template in templates]
    chains = _each("network", copies, lambda x: _layers_of(x, keys, layers, eps))
    _unpack(features, chains, "state_dicts")
    return copies


def from_safetensors(
    files: File | Iterable[File],
    *,
    keys: Keys | None = None,
    layers: Sequence[str] | None = None,
    eps: float | None = None,
) -> WeightFeatures:
    """A batch of networks of one architecture, one per safetensors file, as features of one channel.

    Arguments as for `from_state_dicts`. Files do not keep the order of layers: keys are taken in natural order
    (`net.2` before `net.10`) unless `layers` is given or the file was written by `to_safetensors`.
    """
    paths = [files] if isinstance(files, (str, PathLike)) else list(files)
    chains = []
    for path in paths:
        state_dict = read_safetensors(path)
        chains += _each(f"{fspath(path)}, network", [state_dict], lambda x: _layers_of(x, keys, layers, eps))
    return _pack("from_safetensors", chains)


def to_safetensors(
    features: WeightFeatures,
    files: File | Sequence[File],
    like: StateDict | File | Iterable[StateDict] | None = None,
    *,
    keys: Keys | None = None,
    layers: Sequence[str] | None = None,
    eps: float | None = None,
) -> None:
    """Writes each network into a file: the inverse of `from_safetensors`.

    Arguments as for `to_state_dicts`; `like` may be a safetensors file too.
    """
    save_file = _safetensors("safetensors.torch").save_file
    paths = [files] if isinstance(files, (str, PathLike)) else list(files)
    if len(paths) != features.batch_size:
        raise ValueError(f"{features.batch_size} networks of features cannot be written into {len(paths)} files")
    if isinstance(like, (str, PathLike)):
        like = read_safetensors(like)
    for path, state in zip(paths, to_state_dicts(features, like, keys=keys, layers=layers, eps=eps), strict=True):
        order = [key for entries in _grouped(state, keys, layers).values() for key in entries.values()]
        metadata = {"format": "pt", _ORDER: json.dumps(order)}
        save_file({key: value.contiguous() for key, value in state.items()}, path, metadata)


def read_safetensors(file: File) -> dict[str, Tensor]:
    """The tensors of a file, in the order its layers were written in if it says so, else in natural order of keys."""
    safetensors = _safetensors("safetensors")
    try:
        with safetensors.safe_open(fspath(file), framework="pt") as opened:
            order = json.loads((opened.metadata() or {}).get(_ORDER, "[]"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118, not a dict
    except safetensors.SafetensorError as error:
        raise ValueError(f"{fspath(file)} is not a safetensors file: {error}") from error
    places = {key: place for place, key in enumerate(order)}

    def place(key: str) -> tuple[Any, ...]:
        name, _, role = key.rpartition(".")
        return places.get(key, len(places)), _natural(name), role != "weight", _natural(role)

    return {key: tensors[key] for key in sorted(tensors, key=place)}


def _natural(name: str) -> list[tuple[int, str]]:
    """A key to sort by: numbers in a name by their value."""
    return [(int(x), "") if x.isdecimal() else (-1, x) for x in re.split(r"(\d+)", name)]


def from_nfn(features: Any) -> WeightFeatures:
    """Features of nfn, any object with `weights` and `biases`, as features of ours that share their memory.

    Convolution weights `[B, C, n_i, n_(i-1), kh, kw]` become `[B, C·kh·kw, n_i, n_(i-1)]`: a view too, unless there are
    several channels in nfn's own memory order, which takes one copy.
    """
    return WeightFeatures(
        (w.permute(0, 1, *range(4, w.dim()), 2, 3).flatten(1, -3) if w.dim() > 4 else w for w in features.weights),
        features.biases,
    )


def to_nfn(features: WeightFeatures, like: Any, kernels: Sequence[Sequence[int]] | None = None) -> Any:
    """Features as an object of the caller's own class, sharing memory: the inverse of `from_nfn`.

    Args:
        features: any number of channels.
        like: an object of the class to make, or the class itself.
        kernels: the shape of each layer's kernels, `()` for a dense layer; default those of the object `like`, and
            dense layers if it is a class.
    """
    if kernels is None:
        kernels = [()] * features.num_layers if isinstance(like, type) else kernels_of(like)
    if len(kernels) != features.num_layers:
        raise ValueError(f"kernels must list one shape per layer ({features.num_layers}); found {list(kernels)}")
    weights = []
    for i, (w, kernel) in enumerate(zip(features.weights, kernels, strict=True), start=1):
        taps = w.shape[1] // features.channels
        if prod(kernel) != taps:
            raise ValueError(
                f"layer {i} has {taps} weights per connection; kernels of shape {tuple(kernel)} have {prod(kernel)}. "
                "Pass the shapes as kernels=[(3, 3), …, ()], or like=an object that has them"
            )
        if kernel:
            unfolded = w.unflatten(1, (features.channels, *kernel))
            w = unfolded.permute(0, 1, -2, -1, *range(2, unfolded.dim() - 2))
        weights.append(w)
    cls = like if isinstance(like, type) else type(like)
    return cls(tuple(weights), features.biases)


def kernels_of(features: Any) -> list[tuple[int, ...]]:
    """The kernel shape of each layer of nfn's features, `()` for dense layers."""
    return [tuple(w.shape[4:]) for w in features.weights]


def from_dwsnets(networks: tuple[Sequence[Tensor], Sequence[Tensor]]) -> WeightFeatures:
    """(weights, biases) of DWSNets, `[B, n_(i-1), n_i, C]` and `[B, n_i, C]`, as features that share their memory."""
    weights, biases = networks
    return WeightFeatures((w.permute(0, 3, 2, 1) for w in weights), (b.mT for b in biases))


def to_dwsnets(features: WeightFeatures) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Features as (weights, biases) of DWSNets, sharing memory: the inverse of `from_dwsnets`."""
    return tuple(w.permute(0, 3, 2, 1) for w in features.weights), tuple(b.mT for b in features.biases)


class ZooEntry(NamedTuple):
    """Where a variable stands in a row of the Small CNN Zoo: columns start … end − 1, in the order of `shape`."""

    varname: str
    start: int
    end: int
    shape: tuple[int, ...]


def read_zoo_layout(file: File) -> list[ZooEntry]:
    """The entries of a `layout.csv` of the Small CNN Zoo."""
    with open(file, newline="") as lines:
        rows = list(csv.DictReader(lines))
    wanted = {"varname", "start_idx", "end_idx", "shape"}
    if not rows or not wanted <= rows[0].keys():
        raise ValueError(f"{fspath(file)} has columns {list(rows[0]) if rows else []}; expected {sorted(wanted)}")
    return [
        ZooEntry(row["varname"], int(row["start_idx"]), int(row["end_idx"]), tuple(ast.literal_eval(row["shape"])))
        for row in rows
    ]


def from_zoo_rows(rows: Any, layout: File | Sequence[ZooEntry]) -> WeightFeatures:
    """Rows of the Small CNN Zoo's `weights.npy`, `[N, numbers]` or one row, as features of one channel.

    Args:
        rows: a tensor or an array.
        layout: `layout.csv` or its entries. Kernels are in TensorFlow's order, `[kh, kw, in, out]` and `[in, out]`; a
            dense layer may read a flattened feature map, positions before channels.
    """
    rows = torch.atleast_2d(torch.as_tensor(rows))
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(f"rows are {tuple(rows.shape)} {rows.dtype}; expected floating point numbers [N, numbers]")
    entries = _zoo_entries(layout)
    if rows.shape[1] != entries[-1][0].end:
        raise ValueError(f"rows have {rows.shape[1]} numbers; the layout describes {entries[-1][0].end}")
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for kernel, bias, n_in in _zoo_layers(entries):
        taps = prod(kernel.shape[:-1]) // n_in
        block = rows[:, kernel.start : kernel.end].reshape(len(rows), taps, n_in, kernel.shape[-1])
        weights.append(block.mT.contiguous())
        zeros = rows.new_zeros(len(rows), kernel.shape[-1])
        biases.append((zeros if bias is None else rows[:, bias.start : bias.end]).unsqueeze(1).contiguous())
    return WeightFeatures(weights, biases)


def to_zoo_rows(features: WeightFeatures, layout: File | Sequence[ZooEntry]) -> Tensor:
    """Features of one channel as rows `[N, numbers]`: the inverse of `from_zoo_rows`."""
    entries = _zoo_entries(layout)
    found = list(_zoo_layers(entries))
    taps = [prod(kernel.shape[:-1]) // n_in for kernel, _, n_in in found]
    features.check(WeightSpace((found[0][2], *(kernel.shape[-1] for kernel, _, _ in found)), taps), channels=1)
    rows = features.biases[0].new_empty(features.batch_size, entries[-1][0].end)
    for (kernel, bias, _), w, b in zip(found, features.weights, features.biases, strict=True):
        rows[:, kernel.start : kernel.end] = w.mT.flatten(1)
        if bias is not None:
            rows[:, bias.start : bias.end] = b[:, 0]
        elif b.any():
            raise ValueError(f"'{kernel.varname}' has no bias in the layout but the features have one")
    return rows


def _pack(caller: str, networks: Sequence[list[ChainedLayer]]) -> WeightFeatures:
    """The layers of each network, folded, as one batch of one channel."""
    if not networks:
        raise ValueError(f"{caller} needs at least one network")
    space, first = WeightSpace.of_layers(networks[0]), networks[0][0].weight
    weights: list[list[Tensor]] = [[] for _ in space.taps]
    biases: list[list[Tensor]] = [[] for _ in space.taps]
    for number, network in enumerate(networks):
        if WeightSpace.of_layers(network) != space:
            raise ValueError(
                f"network {number} is {WeightSpace.of_layers(network)}; expected {space} as network 0. "
                "Convert networks of different widths one by one and collate() them"
            )
        for i, layer in enumerate(network):
            w, b = _folded(layer)
            for x in (w, b):
                if x.dtype != first.dtype or x.device != first.device:
                    raise ValueError(
                        f"network {number}, layer '{layer.name}': found {x.dtype} on {x.device}; expected "
                        f"{first.dtype} on {first.device} as in the first layer: bring all to one dtype and device"
                    )
            weights[i].append(w.reshape(w.shape[0], -1, space.taps[i]).permute(2, 0, 1))
            biases[i].append(b)
    return WeightFeatures(map(torch.stack, weights), (torch.stack(b).unsqueeze(1) for b in biases))


def _folded(layer: ChainedLayer) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer and the BatchNorm behind it: with g = scale / √(variance + eps) they are g W and
    g (b − mean) + shift, rounded once."""
    w = layer.weight.detach()
    b = w.new_zeros(w.shape[0]) if layer.bias is None else layer.bias.detach()
    if layer.norm is None:
        return w, b
    norm, wide = layer.norm, torch.float64
    gain = (norm.variance.detach().to(wide) + norm.eps).rsqrt()
    if norm.scale is not None:
        gain = gain * norm.scale.detach()
    bias = gain * (b.to(wide) - norm.mean)
    if norm.shift is not None:
        bias = bias + norm.shift.detach()
    return (w.to(wide) * gain.view(-1, *(1,) * (w.dim() - 1))).to(w.dtype), bias.to(b.dtype)


def _unpack(features: WeightFeatures, networks: Sequence[list[ChainedLayer]], what: str) -> None:
    """Writes features into the layers' own tensors; all is checked before anything is written."""
    if len(networks) != features.batch_size:
        raise ValueError(f"{features.batch_size} networks of features cannot be written into {len(networks)} {what}")
    for number, network in enumerate(networks):
        features.check(WeightSpace.of_layers(network), channels=1)
        for layer, b in zip(network, features.biases, strict=True):
            if layer.bias is None and layer.norm is None and b[number].any():
                raise ValueError(f"layer '{layer.name}' has no bias but the features of network {number} have one")
    writes: dict[int, tuple[str, Tensor, Tensor]] = {}  # by the identity of what is written to
    for number, network in enumerate(networks):
        for layer, w, b in zip(network, features.weights, features.biases, strict=True):
            place = f"layer '{layer.name}' of network {number}"
            for target, value in _writes(layer, w[number], b[number, 0]):
                value = value.to(target)
                other, _, before = writes.setdefault(id(target), (place, target, value))
                if not torch.allclose(before, value, rtol=0, atol=0, equal_nan=True):
                    raise ValueError(
                        f"{place} shares its numbers with {other} but the features of the two differ; "
                        f"expected equal features, or {what} that share nothing"
                    )
    with torch.no_grad():
        for _, target, value in writes.values():
            target.copy_(value)


def _writes(layer: ChainedLayer, w: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor of a layer with its new value, w `[taps, n_i, n_(i-1)]` and b `[n_i]`: the BatchNorm becomes the
    identity, or takes the bias of a layer that has none."""
    yield layer.weight, w.permute(1, 2, 0).reshape(layer.weight.shape)
    if layer.bias is not None:
        yield layer.bias, b
    norm = layer.norm
    if norm is not None:
        yield norm.mean, -b if layer.bias is None else torch.zeros_like(norm.mean)
        yield norm.variance, torch.full_like(norm.variance, 1 - norm.eps)
        if norm.scale is not None:
            yield norm.scale, torch.ones_like(norm.scale)
        if norm.shift is not None:
            yield norm.shift, torch.zeros_like(norm.shift)


def _layers_of(
    state_dict: StateDict, keys: Keys | None, layers: Sequence[str] | None, eps: float | None
) -> list[ChainedLayer]:
    """The layers of a state_dict, in order, sharing its tensors."""
    chain: list[ChainedLayer] = []
    for name, found in _grouped(state_dict, keys, layers).items():
        entries = {role: state_dict[key] for role, key in found.items()}
        if entries.keys() & {"running_mean", "running_var", "num_batches_tracked"}:
            if not chain:
                raise ValueError(f"BatchNorm '{name}' stands in front of the first layer; expected it behind a layer")
            chain[-1] = chain[-1].followed_by(_norm_from(name, entries, eps), name)
        else:
            chain.append(_layer_from(name, entries))
    if not chain:
        raise ValueError(f"the state_dict has no layer: {len(state_dict)} entries; expected keys '<layer>.weight'")
    return chain


def _grouped(state_dict: StateDict, keys: Keys | None, layers: Sequence[str] | None) -> dict[str, dict[str, str]]:
    """The key of each role of each layer, layers in order."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"found {type(state_dict).__name__}; expected a state_dict, a mapping from names to tensors")
    groups: dict[str, dict[str, str]] = {}
    for key, tensor in state_dict.items():
        meaning = _meaning(key, keys)
        if meaning is None:
            continue
        name, _, role = meaning.rpartition(".")
        _check_entry(key, role, tensor)
        if role in groups.setdefault(name, {}):
            raise ValueError(f"key '{key}' is a second '{meaning}'; expected one of each")
        groups[name][role] = key
    order = list(groups) if layers is None else list(layers)
    if set(order) != set(groups) or len(order) != len(groups):
        raise ValueError(
            f"layers={order} does not list each layer of the state_dict once; it has {list(groups)}. "
            "Entries to leave out are those that keys= maps to None"
        )
    return {name: groups[name] for name in order}


def _meaning(key: Any, keys: Keys | None) -> str | None:
    if not isinstance(key, str):
        raise TypeError(f"key {key!r} is {type(key).__name__}; expected a str")
    meaning = key if keys is None else keys(key) if callable(keys) else keys.get(key, key)
    if meaning is not None and meaning.rpartition(".")[2] not in _ROLES:
        raise ValueError(
            f"key '{key}' is no entry of a dense, convolution or BatchNorm layer; expected '<layer>.' and one of "
            f"{_ROLES}. "
            f"Say what it means with keys={{{key!r}: '<layer>.weight'}}, or leave it out with keys={{{key!r}: None}}"
        )
    return meaning


def _check_entry(key: str, role: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"'{key}' is {type(tensor).__name__}; expected a tensor (torch.from_numpy makes one of an array)"
        )
    if role == "num_batches_tracked":
        return
    if not tensor.is_floating_point() or tensor.layout != torch.strided:
        raise ValueError(
            f"'{key}' is {tensor.dtype}, {tensor.layout}; expected floating point numbers, dense in memory: "
            "dequantize or convert it first"
        )
    if role == "weight":
        if not 1 <= tensor.dim() <= 5:
            raise ValueError(f"'{key}' is {tuple(tensor.shape)}; expected [n_out, n_in] or [n_out, n_in, kernel…]")
    elif tensor.dim() != 1:
        raise ValueError(f"'{key}' is {tuple(tensor.shape)}; expected one number per neuron, [n_out]")


def _layer_from(name: str, entries: dict[str, Tensor]) -> ChainedLayer:
    weight, bias = entries.get("weight"), entries.get("bias")
    if weight is None:
        raise ValueError(f"layer '{name}' has {list(entries)} but no weight; expected a key '{name}.weight'")
    if weight.dim() == 1:
        raise ValueError(
            f"'{name}.weight' is {tuple(weight.shape)}: a normalisation without running statistics, which no fixed "
            "weights stand for; remove it from the network, or leave it out with keys="
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"'{name}.bias' is {tuple(bias.shape)}; expected {tuple(weight.shape[:1])} as '{name}.weight' is "
            f"{tuple(weight.shape)}, [n_out, n_in, …]"
        )
    return ChainedLayer(name, weight, bias)


def _norm_from(name: str, entries: dict[str, Tensor], eps: float | None) -> Norm:
    missing = [role for role in ("running_mean", "running_var") if role not in entries]
    if missing:
        raise ValueError(f"BatchNorm '{name}' has {list(entries)} but no {', '.join(missing)}")
    for role, tensor in entries.items():
        if role != "num_batches_tracked" and tensor.shape != entries["running_mean"].shape:
            raise ValueError(
                f"'{name}.{role}' is {tuple(tensor.shape)}; expected {tuple(entries['running_mean'].shape)} "
                f"as '{name}.running_mean'"
            )
    if eps is None:
        eps = 1e-5
        # Of one place in the code, so that Python's own filter shows it once, not for each network.
        warnings.warn(
            f"a state_dict does not hold the eps of its BatchNorms; assumed {eps}, torch's default. Pass eps= to say "
            "what it is",
            stacklevel=1,
        )
    return Norm(entries["running_mean"], entries["running_var"], entries.get("weight"), entries.get("bias"), eps)


def _each(what: str, networks: Sequence[Any], read: Callable[[Any], list[ChainedLayer]]) -> list[list[ChainedLayer]]:
    """`read` of each network; errors say which network it was."""
    found = []
    for number, network in enumerate(networks):
        try:
            found.append(read(network))
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{what} {number}: {error}") from error
    return found


def _plain_state_dict(features: WeightFeatures) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for i, (w, b, taps) in enumerate(zip(features.weights, features.biases, features.space.taps, strict=True)):
        kernel = () if taps == 1 else (taps,)
        state[f"{i}.weight"] = w.new_empty(*w.shape[2:], *kernel)
        state[f"{i}.bias"] = b.new_empty(b.shape[2])
    return state


def _clone(state_dict: StateDict) -> dict[str, Tensor]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"like: found {type(state_dict).__name__}; expected a state_dict or one for each network")
    # The OrderedDict of nn.Module.state_dict keeps its metadata when copied.
    cloned = copy(state_dict) if isinstance(state_dict, dict) else dict(state_dict)
    for key, value in state_dict.items():
        cloned[key] = value.detach().clone() if isinstance(value, Tensor) else value
    return cloned


def _safetensors(module: str) -> Any:
    try:
        return __import__(module, fromlist=["safe_open"])
    except ImportError as error:
        raise ImportError(
            "safetensors files need the package safetensors: pip install magep-fast[safetensors]"
        ) from error


def _zoo_entries(layout: File | Sequence[ZooEntry]) -> list[tuple[ZooEntry, str, str]]:
    """Entries in order of their place in a row, each with its layer and role."""
    entries = read_zoo_layout(layout) if isinstance(layout, (str, PathLike)) else [ZooEntry(*x) for x in layout]
    found, end = [], 0
    for entry in sorted(entries, key=lambda entry: entry.start):
        layer, _, role = entry.varname.rpartition("/")
        if role not in ("kernel:0", "bias:0"):
            raise ValueError(f"variable '{entry.varname}' of the layout is neither 'kernel:0' nor 'bias:0'")
        if entry.start != end or prod(entry.shape) != entry.end - entry.start:
            raise ValueError(
                f"variable '{entry.varname}' of shape {entry.shape} stands at {entry.start} … {entry.end}; expected "
                f"{prod(entry.shape)} numbers from {end} on: the variables of a layout fill the row one after the other"
            )
        if len(entry.shape) != 1 if role == "bias:0" else len(entry.shape) < 2:
            raise ValueError(
                f"variable '{entry.varname}' has shape {entry.shape}; expected [kh, kw, in, out], [in, out] or [out]"
            )
        end = entry.end
        found.append((entry, layer, role))
    if not found:
        raise ValueError("the layout is empty; expected one entry per variable")
    return found


def _zoo_layers(entries: list[tuple[ZooEntry, str, str]]) -> Iterable[tuple[ZooEntry, ZooEntry | None, int]]:
    """Kernel, bias or None, and n_(i-1) of each layer, in order of appearance."""
    layers: dict[str, dict[str, ZooEntry]] = {}
    for entry, layer, role in entries:
        layers.setdefault(layer, {})[role] = entry
    width: int | None = None
    flattens = False  # a dense layer behind a convolution may read several positions of each neuron
    for layer, found in layers.items():
        kernel, bias = found.get("kernel:0"), found.get("bias:0")
        if kernel is None:
            raise ValueError(f"layer '{layer}' of the layout has no kernel:0")
        n_in, n_out = kernel.shape[-2:]
        if bias is not None and bias.shape != (n_out,):
            raise ValueError(f"variable '{bias.varname}' has shape {bias.shape}; expected {(n_out,)}")
        flattens = flattens and len(kernel.shape) == 2
        if width is not None and (n_in % width or (n_in != width and not flattens)):
            raise ValueError(f"layer '{layer}' reads {n_in} features but the layer before it gives {width}")
        yield kernel, bias, width or n_in
        width, flattens = n_out, len(kernel.shape) > 2
