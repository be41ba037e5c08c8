"""One way to read every data set there is: those made here, and those that researchers have."""

from __future__ import annotations

from pathlib import Path

from benchmarks.data import readers
from benchmarks.data.networks import MANIFEST, SPLITS, DataError, Networks, ShardedNetworks


class Source:
    """The networks of a folder, split by split: in the format of networks.py, of the CNN Zoo, or SIRENs in folders.

    Args:
        activation: the one that is expected; of a zoo, which has several, the one that is chosen.
    """

    def __init__(self, folder: Path, activation: str | None = None):
        self.folder = folder
        self._whole: Networks | None = None
        if (folder / "weights.npy").exists():
            self._whole = readers.read_cnn_zoo(folder, activation)
        elif not (folder / MANIFEST).exists() and readers.siren_files(folder):
            self._whole = readers.read_sirens(folder)
        if self._whole is not None:
            self.space, self.activation, self.options = self._whole.space, self._whole.activation, self._whole.options
            self._splits = [self._whole.columns["split"]]
        else:
            self._shards = ShardedNetworks(folder)
            manifest = self._shards.manifest
            self.space, self.activation, self.options = manifest.space, manifest.activation, manifest.options
            self._splits = [self._shards.read_column(shard, "split") for shard in range(manifest.shards)]
        if activation is not None and self.activation != activation:
            raise DataError(f"{folder} holds networks with activation {self.activation!r}; expected {activation!r}")

    def count(self, split: str) -> int:
        """Networks for "train", "val" or "test"."""
        return sum(self._counts(split))

    def read(self, split: str, start: int = 0, stop: int | None = None) -> Networks:
        """The networks start … stop − 1 of a split. Of a sharded data set only the files that hold them are read."""
        stop = self.count(split) if stop is None else stop
        if not start < stop:
            raise DataError(f"{self.folder} has no networks {start} … {stop - 1} in its {split} split")
        parts, first = [], 0
        for shard, count in enumerate(self._counts(split)):
            if first < stop and first + count > start:
                networks = self._shards.read(shard) if self._whole is None else self._whole
                parts.append(networks.split(split)[max(start - first, 0) : stop - first])
            first += count
        return Networks.cat(parts)

    def _counts(self, split: str) -> list[int]:
        return [int((column == SPLITS.index(split)).sum()) for column in self._splits]
