import copy
import csv
import gzip

import numpy
import pytest
import torch
from torch import nn

from benchmarks.data.stand_ins import CNN, make_accuracies, make_classes, make_networks, read_zoo
from benchmarks.training import Adam, Dataset, Trainer
from magep_fast import GroupElement, WeightSpace, from_modules
from magep_fast.models import CnnGeneralization
from magep_fast.ops.library import missing_library
from tests.helpers import assert_same

SMALL = WeightSpace((1, 4, 3), (9, 1))


def test_batches_are_contiguous():
    networks = make_networks(SMALL, 10)
    data = Dataset(networks, torch.arange(10.0))
    index = torch.tensor([7, 2, 2])
    batch, targets = data.batch(index)
    assert_same(batch, networks[index])
    assert targets.tolist() == [7, 2, 2]
    assert all(x.is_contiguous() for x in batch.tensors())


def test_an_epoch_visits_every_network_once_in_another_order_than_the_next():
    seen = []
    data = Dataset(make_networks(SMALL, 10), torch.arange(10.0))

    class Constant(nn.Linear):
        def forward(self, networks):
            return self.weight.sum()

    trainer = Trainer(Constant(1, 1), data, lambda output, targets: seen.append(targets) or output, 4)
    for steps in (2, 3, 1):
        assert trainer.run(steps).shape == (steps,)
    epochs = [torch.cat(seen[:3]).tolist(), torch.cat(seen[3:]).tolist()]
    assert [len(x) for x in seen] == [4, 4, 2] * 2
    assert epochs[0] != epochs[1] and all(sorted(epoch) == list(range(10)) for epoch in epochs)


def test_a_trainer_s_steps_are_fused_where_they_can_be(monkeypatch):
    """And then train as its Adam does in ordinary steps."""
    networks = make_networks(SMALL, 10)
    data = Dataset(networks, make_accuracies(networks))

    def parameters(*together):
        torch.manual_seed(0)
        model = CnnGeneralization(channels=2, hidden=3).build(SMALL)
        trainer = Trainer(model, data, nn.functional.binary_cross_entropy, 4)
        for fused in together:
            with monkeypatch.context() as patch:
                patch.setattr(Adam, "steps_like_adam", fused)
                trainer.run(1)
            has_gradients = [p.grad is not None for p in model.parameters()]
            assert has_gradients == [not fused or missing_library() is not None] * len(has_gradients)
        return [p.detach() for p in model.parameters()]

    expected = parameters(*[False] * 6)
    for together in ([True] * 6, [False, True, False, False, True, True], [True, False] * 3):
        for p, q in zip(parameters(*together), expected, strict=True):
            assert_same(p, q, 1e-4)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_magep_learns(activation):
    networks = make_networks(CNN, 16)
    data = Dataset(networks, make_accuracies(networks).round())
    torch.manual_seed(0)
    model = CnnGeneralization(activation=activation).build(CNN)
    trainer = Trainer(model, data, nn.functional.binary_cross_entropy, 16)
    losses = trainer.run(12)
    assert losses[-1] < losses[0] - 0.01


def test_made_targets_do_not_depend_on_the_order_or_scale_of_neurons():
    networks = make_networks(CNN, 20)
    moved = GroupElement.sample(CNN, batch_size=20) @ networks
    accuracies = make_accuracies(networks)
    assert accuracies.shape == (20, 1) and ((accuracies > 0) & (accuracies < 1)).all() and accuracies.std() > 0.01
    assert torch.equal(make_accuracies(moved), accuracies)
    assert make_classes(networks).bincount().tolist() == [2] * 10


def write_zoo(folder, networks, activations, steps):
    """Networks as the zoo publishes them: rows of numbers, kernels in TensorFlow's order."""
    rows, layout = [], []
    for network in networks:
        row = []
        for place, layer in enumerate(m for m in network if isinstance(m, (nn.Conv2d, nn.Linear))):
            order = (2, 3, 1, 0) if layer.weight.dim() == 4 else (1, 0)
            for name, x in (("bias:0", layer.bias), ("kernel:0", layer.weight.permute(order))):
                if len(rows) == 0:
                    start = sum(len(part) for part in row)
                    layout.append(
                        (f"sequential/layer_{place}/{name}", start, start + x.numel(), x.numel(), tuple(x.shape))
                    )
                row.append(x.detach().flatten().numpy())
        rows.append(numpy.concatenate(row))
    numpy.save(folder / "weights.npy", numpy.stack(rows))
    with (folder / "layout.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("varname", "start_idx", "end_idx", "size", "shape"), *layout])
    with gzip.open(folder / "metrics.csv.gz", "wt", newline="") as file:
        accuracies = [0.1 * k for k in range(len(networks))]
        lines = zip(activations, steps, accuracies, strict=True)
        csv.writer(file).writerows([("config.activation", "step", "test_accuracy"), *lines])


def test_the_zoo_is_read_as_published(tmp_path):
    networks = [
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
        for _ in range(5)
    ]
    write_zoo(tmp_path, networks, ["relu", "tanh", "relu", "relu", "relu"], [86, 86, 20, 86, 86])
    features, accuracies = read_zoo(tmp_path, "relu", 2)
    assert_same(features, from_modules([networks[0], networks[3]]))
    torch.testing.assert_close(accuracies, torch.tensor([[0.0], [0.3]]))
    with pytest.raises(ValueError, match=r"no network with activation 'sin' at step 86; it has \['relu', 'tanh'\]"):
        read_zoo(tmp_path, "sin", 2)
    (tmp_path / "layout.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no layout\.csv"):
        read_zoo(tmp_path, "relu", 2)


def test_adam_is_torch_s():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 4), nn.Linear(3, 4)
    theirs.load_state_dict(ours.state_dict())
    unused = nn.Parameter(torch.ones(2))
    pairs = ((ours, Adam([*ours.parameters(), unused], 0.01)), (theirs, torch.optim.Adam(theirs.parameters(), 0.01)))
    x_now = torch.randn(8, 3)
    for _ in range(5):
        x = torch.randn(8, 3)
        for model, optimiser in pairs:
            optimiser.zero_grad()
            model(x).square().sum().backward()
            optimiser.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert torch.equal(unused, torch.ones(2))
    # The state is torch's, and can be loaded from it.
    optimiser = pairs[0][1]
    expected = copy.deepcopy(pairs[1][1].state_dict()["state"])
    for k, entry in optimiser.state_dict()["state"].items():
        for name, x in entry.items():
            torch.testing.assert_close(x, expected[k][name])
    loaded = Adam([*ours.parameters(), unused], 0.01)
    loaded.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    for model, each in ((ours, loaded), pairs[1]):
        each.zero_grad()
        model(x_now).square().sum().backward()
        each.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    ours.bias.grad = None
    with pytest.raises(RuntimeError, match="a parameter that was trained before has no gradient at this step"):
        loaded.step()
