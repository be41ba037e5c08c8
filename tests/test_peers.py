import pytest
import torch
from torch import nn

from benchmarks.peers import PAPER, SUBSETS, peers
from magep_fast import GroupElement, WeightSpace
from tests.helpers import assert_same, random_features

pytest.importorskip("nfn", reason="the NP, HNP and STATNN rivals are made of nfn's layers: pip install .[bench]")
pytest.importorskip("torch_geometric", reason="the graph rivals are made of its message passing: pip install .[bench]")

CNN = WeightSpace((1, 16, 16, 16, 10), (9, 9, 9, 1))
SMALL = WeightSpace((2, 6, 5, 4), (9, 4, 1))
PEERS = [(subset, peer) for subset in SUBSETS for peer in peers(subset)]

every_peer = pytest.mark.parametrize(("subset", "peer"), PEERS, ids=[f"{s} {p.name}" for s, p in PEERS])


def precision(peer):
    """A dtype the peer can compute in, and how far its outputs may be off. (nfn's statistics are float32 only.)"""
    return (torch.float32, 1e-6) if peer.name == "STATNN" else (torch.float64, 1e-9)


def test_every_system_of_the_paper_is_there():
    for subset in SUBSETS:
        names = {peer.name for peer in peers(subset)}
        assert set(PAPER[subset]) - names == {"MAGEP"}
        assert names - set(PAPER[subset]) == {"MLP", "GNN-32"}


@pytest.mark.parametrize(
    ("subset", "peer"), [x for x in PEERS if x[1].paper.parameters], ids=lambda x: getattr(x, "name", x)
)
def test_parameter_counts_are_the_paper_s(subset, peer):
    parameters = sum(p.numel() for p in peer.build(CNN).parameters())
    assert parameters == pytest.approx(peer.paper.parameters * 1e6, rel=0.02)


def test_scale_gmn_has_as_many_parameters_as_its_authors_configuration():
    (peer,) = (peer for peer in peers("relu") if peer.name == "ScaleGMN")
    assert sum(p.numel() for p in peer.build(CNN).parameters()) == 1_356_801


@every_peer
def test_symmetry_that_its_paper_claims(subset, peer):
    dtype, tolerance = precision(peer)
    features = random_features(SMALL, channels=1, batch_size=3, dtype=dtype)
    model = peer.build(SMALL).to(dtype)
    y = model(features)
    assert y.shape == (3, 1) and ((y > 0) & (y < 1)).all()
    assert y.std() > 20 * tolerance  # other networks are told apart
    if peer.symmetry is None:
        g = GroupElement.sample(SMALL, "permutation", batch_size=3)
        assert (model(g @ features) - y).abs().max() > 1e-6
    else:
        g = GroupElement.sample(SMALL, peer.symmetry, batch_size=3)
        assert_same(model(g @ features), y, tolerance)


@every_peer
def test_networks_of_a_batch_do_not_mix(subset, peer):
    dtype, tolerance = precision(peer)
    features = random_features(SMALL, channels=1, batch_size=3, dtype=dtype)
    model = peer.build(SMALL).to(dtype)
    assert_same(model(features[1]), model(features)[1:2], tolerance)


@every_peer
def test_a_few_steps_lower_the_loss(subset, peer):
    features = random_features(SMALL, channels=1, batch_size=8, dtype=torch.float32)
    target = torch.rand(8, 1).round()
    model = peer.build(SMALL)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(8):
        loss = nn.functional.binary_cross_entropy(model(features), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1e-3


def test_a_missing_library_is_named(monkeypatch):
    import builtins

    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("nfn"):
            raise ModuleNotFoundError("No module named 'nfn'", name="nfn")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(__import__("sys").modules, "benchmarks.peers.np", raising=False)
    (peer,) = (peer for peer in peers("relu") if peer.name == "NP")
    with pytest.raises(ModuleNotFoundError, match=r"nfn is not installed: pip install 'magep-fast\[bench\]'"):
        peer.build(CNN)
