"""The format in which data sets of trained networks are kept, and how they are read.

A folder with `manifest.json` and `shard-00000.safetensors`, `shard-00001.safetensors`, …

    manifest.json        what all networks have in common: `space` (widths, taps), `activation`, `maker` and its
                         `options`, seed included, `columns` in words, and how many `shards` there shall be
    shard-*.safetensors  of n networks `weight_1` … `weight_L` [n, taps_i, n_i, n_(i-1)], `bias_1` … `bias_L` [n, n_i],
                         float32, and a tensor [n, …] for each column; as metadata the fingerprint of the manifest and
                         a checksum of the tensors

The column `split` says for every network whether it is for training (0), validation (1) or testing (2).
Files appear whole or not at all, so whoever makes a data set may be killed at any time and goes on with the shards that
are missing, in any order, also several makers at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from magep_fast import WeightFeatures, WeightSpace

FORMAT = "magep-fast networks, version 1"
SPLITS = ("train", "val", "test")
MANIFEST = "manifest.json"


class DataError(ValueError):
    """A data set that cannot be read as it is; the message names the file."""


@dataclass(frozen=True)
class Manifest:
    """What all networks of a data set have in common.

    Args:
        activation: of the networks: "relu", "tanh", "sin".
        maker: which program made them.
        options: of the maker, among them its seed and how a SIREN's output becomes an image.
        columns: what is known of each network, by name, in words.
        shards: how many files the finished data set has.
    """

    space: WeightSpace
    activation: str
    maker: str
    options: dict[str, Any]
    columns: dict[str, str]
    shards: int

    def json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.json(), sort_keys=True).encode()).hexdigest()

    @staticmethod
    def read(folder: Path) -> Manifest:
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError as error:
            reason = f"has no {MANIFEST}" if folder.exists() else "does not exist"
            raise DataError(
                f"{folder} {reason}; expected a data set made by python -m benchmarks data, of the Small CNN Zoo, or "
                "of SIRENs in folders <prefix>_<label>s"
            ) from error
        except ValueError as error:
            raise DataError(f"{path} is not JSON ({error}); restore it, or make the data set anew elsewhere") from error
        found = content.pop("format", None) if isinstance(content, dict) else None
        if found != FORMAT:
            raise DataError(f"{path} has format {found!r}; expected {FORMAT!r}")
        try:
            space = content.pop("space")
            return Manifest(WeightSpace(space["widths"], space["taps"]), **content)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} does not describe a data set: {error}") from error


@dataclass(frozen=True)
class Networks:
    """Networks of one channel and what is known of each: `columns[name]` is a tensor `[N, …]`."""

    features: WeightFeatures
    activation: str
    columns: dict[str, Tensor]
    options: dict[str, Any]

    def __len__(self) -> int:
        return self.features.batch_size

    @property
    def space(self) -> WeightSpace:
        return self.features.space

    def __getitem__(self, index: Tensor | slice) -> Networks:
        columns = {name: column[index] for name, column in self.columns.items()}
        return replace(self, features=self.features[index], columns=columns)

    def split(self, name: str) -> Networks:
        """Those for "train", "val" or "test"."""
        return self[self.columns["split"] == SPLITS.index(name)]

    @staticmethod
    def cat(parts: Iterable[Networks]) -> Networks:
        parts = list(parts)
        columns = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
        return replace(parts[0], features=WeightFeatures.cat(part.features for part in parts), columns=columns)


class ShardedNetworks:
    """A data set in a folder, in the format of this module.

    Args:
        folder: is created if there is a manifest to write.
        manifest: of a data set that is being made. If the folder holds one already it must be the same. Without
            it the folder's own is read.
    """

    def __init__(self, folder: Path, manifest: Manifest | None = None):
        self.folder = folder
        if manifest is None:
            self.manifest = Manifest.read(folder)
            return
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():
            _require_same(folder / MANIFEST, Manifest.read(folder), manifest)
        self.manifest = manifest
        write_atomically(folder / MANIFEST, (json.dumps(manifest.json(), indent=2) + "\n").encode())

    def path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.safetensors"

    def missing(self) -> list[int]:
        """The shards still to be made."""
        return [shard for shard in range(self.manifest.shards) if not self.path(shard).exists()]

    def write(self, shard: int, features: WeightFeatures, columns: dict[str, Tensor]) -> None:
        """One shard. Every tensor must be finite and every column of the manifest must be there."""
        if set(columns) != set(self.manifest.columns):
            raise ValueError(f"shard {shard} has columns {sorted(columns)}; expected {sorted(self.manifest.columns)}")
        features.check(self.manifest.space, channels=1)
        tensors = {name: x.contiguous() for name, x in (_named(features) | columns).items()}
        _require_finite(self.path(shard), tensors)
        metadata = {"manifest": self.manifest.fingerprint, "checksum": _checksum(tensors)}
        write_atomically(self.path(shard), save(tensors, metadata))

    def read(self, shard: int) -> Networks:
        """One shard, checked in every way a file can be wrong."""
        path, space = self.path(shard), self.manifest.space
        with self._open(shard) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("manifest") != self.manifest.fingerprint:
            raise DataError(f"{path} belongs to another {MANIFEST} than the one beside it; do not mix data sets")
        if metadata.get("checksum") != _checksum(tensors):
            raise DataError(f"{path} is corrupt: its checksum does not fit its content; delete it and make it again")
        _require_finite(path, tensors)
        L = space.num_layers
        try:
            weights = [tensors.pop(f"weight_{i}") for i in range(1, L + 1)]
            biases = [tensors.pop(f"bias_{i}").unsqueeze(1) for i in range(1, L + 1)]
            features = WeightFeatures(weights, biases)
            features.check(space, channels=1)
        except (KeyError, ValueError) as error:
            raise DataError(f"{path} does not hold networks of {space}: {error}") from error
        if set(tensors) != set(self.manifest.columns):
            raise DataError(f"{path} has columns {sorted(tensors)}; expected {sorted(self.manifest.columns)}")
        return Networks(features, self.manifest.activation, tensors, self.manifest.options)

    def read_column(self, shard: int, name: str) -> Tensor:
        """One column of a shard, and nothing else of the file."""
        with self._open(shard) as file:
            if name not in file.keys():  # noqa: SIM118
                raise DataError(f"{self.path(shard)} has no column {name!r}")
            return file.get_tensor(name)

    def _open(self, shard: int) -> Any:
        path = self.path(shard)
        try:
            return safe_open(path, "pt")
        except FileNotFoundError as error:
            raise DataError(
                f"{path} is missing: {len(self.missing())} of {self.manifest.shards} shards are not made yet; "
                "run the command that made the others again, it goes on where it stopped"
            ) from error
        except SafetensorError as error:
            raise DataError(f"{path} is truncated or corrupt ({error}); delete it and make it again") from error


def write_atomically(path: Path, content: bytes) -> None:
    """The file appears whole or not at all, also if the machine stops."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _named(features: WeightFeatures) -> dict[str, Tensor]:
    weights = {f"weight_{i}": w for i, w in enumerate(features.weights, start=1)}
    return weights | {f"bias_{i}": b.squeeze(1) for i, b in enumerate(features.biases, start=1)}


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


def _require_finite(path: Path, tensors: dict[str, Tensor]) -> None:
    for name, x in tensors.items():
        if x.is_floating_point() and not x.isfinite().all():
            row = (
                int((~x.isfinite()).flatten(1).any(1).nonzero()[0])
                if x.dim() > 1
                else int((~x.isfinite()).nonzero()[0])
            )
            raise DataError(f"{path}: {name} of network {row} holds NaN or infinity; leave such networks out")


def _require_same(path: Path, found: Manifest, wanted: Manifest) -> None:
    old, new = found.json(), wanted.json()
    old, new = old | old.pop("options"), new | new.pop("options")
    differing = [name for name in sorted(set(old) | set(new)) if old.get(name) != new.get(name)]
    if differing:
        found_text = ", ".join(f"{name} = {old.get(name)!r}, not {new.get(name)!r}" for name in differing)
        raise DataError(f"{path} describes another data set ({found_text}); give another folder, or the same options")
