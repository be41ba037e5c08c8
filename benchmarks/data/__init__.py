"""Weight-space data sets: made here (`python -m benchmarks data`), kept in one format, or read from what others have."""

from benchmarks.data.images import Images, read_images
from benchmarks.data.networks import Manifest, Networks, ShardedNetworks, read_networks

__all__ = ["Images", "Manifest", "Networks", "ShardedNetworks", "read_images", "read_networks"]
