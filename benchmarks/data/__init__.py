"""Weight-space data sets: made here (`python -m benchmarks data`) in one format, or read from what others have."""

from benchmarks.data.images import Images, read_images
from benchmarks.data.networks import DataError, Manifest, Networks, ShardedNetworks
from benchmarks.data.source import Source

__all__ = ["DataError", "Images", "Manifest", "Networks", "ShardedNetworks", "Source", "read_images"]
