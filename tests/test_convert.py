import builtins
from collections import OrderedDict
from copy import deepcopy
from re import escape

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from magep_fast import (
    WeightFeatures,
    WeightSpace,
    from_dwsnets,
    from_modules,
    from_nfn,
    from_safetensors,
    from_state_dicts,
    from_zoo_rows,
    to_dwsnets,
    to_modules,
    to_nfn,
    to_safetensors,
    to_state_dicts,
    to_zoo_rows,
)
from magep_fast.convert import ZooEntry, read_safetensors, read_zoo_layout
from tests.helpers import assert_same, random_features


def mlp(bias=True, hidden=5):
    return nn.Sequential(nn.Linear(3, hidden, bias), nn.Tanh(), nn.Linear(hidden, 2, bias))


def cnn():
    return nn.Sequential(nn.Conv2d(2, 4, (3, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6, 3))


@pytest.mark.parametrize("make", [mlp, cnn])
def test_round_trip(make):
    networks = [make() for _ in range(3)]
    features = from_modules(networks)
    assert features.space == WeightSpace.of(networks[0])
    assert (features.batch_size, features.channels) == (3, 1)
    others = [make() for _ in range(3)]
    to_modules(features, others)
    for network, other in zip(networks, others, strict=True):
        for x, y in zip(network.parameters(), other.parameters(), strict=True):
            assert torch.equal(x, y)


def test_taps_join_the_channels():
    network = cnn()
    conv, dense = network[0], network[3]
    features = from_modules(network)
    for row in range(3):
        for column in range(2):
            assert torch.equal(features.weights[0][0, 2 * row + column], conv.weight[:, :, row, column])
    for position in range(6):
        assert torch.equal(features.weights[1][0, position], dense.weight[:, position::6])


def test_features_do_not_share_memory_with_the_modules():
    network = mlp()
    features = from_modules(network)
    before = features.map(torch.clone)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert_same(features, before)


def test_one_module_is_a_batch_of_one():
    network = mlp()
    assert_same(from_modules(network), from_modules([network]))
    other = mlp()
    to_modules(from_modules(network), other)
    assert_same(from_modules(other), from_modules(network))


def test_layer_without_bias_has_a_zero_bias():
    network = mlp(bias=False)
    features = from_modules(network)
    assert not any(b.any() for b in features.biases)
    other = mlp(bias=False)
    to_modules(features, other)
    assert_same(from_modules(other), features)
    with pytest.raises(ValueError, match="layer '0' has no bias but the features of network 0 have one"):
        to_modules(from_modules(mlp()), network)


def test_from_modules_refuses_an_empty_list():
    with pytest.raises(ValueError, match="from_modules needs at least one network"):
        from_modules([])


def test_from_modules_refuses_mixed_architectures():
    message = "network 1 is WeightSpace(3-6-2); expected WeightSpace(3-5-2) as network 0"
    with pytest.raises(ValueError, match=escape(message)):
        from_modules([mlp(), mlp(hidden=6)])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([mlp()], "2 networks of features cannot be written into 1 modules"),
        ([mlp(), nn.Linear(3, 2)], "WeightSpace(3-2) has 1 layers; the features have 2"),
        ([mlp(), mlp(hidden=6)], "layer 1: weights are (2, 1, 5, 3); expected (2, 1, 6, 3)"),
    ],
)
def test_to_modules_refuses_other_targets(targets, message):
    with pytest.raises(ValueError, match=escape(message)):
        to_modules(from_modules([mlp(), mlp()]), targets)


def test_to_modules_takes_one_channel():
    features = from_modules(mlp()).map(lambda x: torch.cat([x, x], dim=1))
    with pytest.raises(ValueError, match="expected features of 1 channels; found 2"):
        to_modules(features, mlp())


def test_refused_features_leave_the_modules_untouched():
    network = mlp(bias=False)
    before = deepcopy(network.state_dict())
    with pytest.raises(ValueError, match="has no bias"):
        to_modules(from_modules(mlp()), network)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (lambda x: prune.random_unstructured(x, "weight", 0.5), "prune.remove"),
        (lambda x: prune.random_unstructured(x, "bias", 0.5), "prune.remove"),
        (nn.utils.weight_norm, "remove_weight_norm"),
        (nn.utils.spectral_norm, "remove_spectral_norm"),
        (nn.utils.parametrizations.weight_norm, "parametrize.remove_parametrizations"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_computed_weights_are_refused(change, advice):
    layer = nn.Linear(3, 3)
    change(layer)
    with pytest.raises(ValueError, match=rf"(?s)layer '0' .* is computed from other tensors.*{advice}"):
        from_modules(nn.Sequential(layer))


def test_computed_weights_of_a_batch_norm_are_refused():
    norm = nn.BatchNorm1d(3)
    prune.random_unstructured(norm, "weight", 0.5)
    with pytest.raises(ValueError, match=r"layer '1' .* is computed from other tensors"):
        from_modules(nn.Sequential(nn.Linear(3, 3), norm))


def test_a_module_used_twice_takes_one_set_of_numbers():
    layer = nn.Linear(3, 3)
    network = nn.Sequential(layer, nn.ReLU(), layer)
    features = from_modules(network)
    for x in features.biases:
        x[0, 0, 0] = torch.nan
    to_modules(features, network)
    before = deepcopy(network.state_dict())
    for tensor in (features.weights[1], features.biases[1]):
        tensor.add_(1)
        with pytest.raises(ValueError, match=escape("layer '2' of network 0 shares its numbers with layer '0' of net")):
            to_modules(features, network)
        tensor.sub_(1)
    same_state(network.state_dict(), before)
    with pytest.raises(ValueError, match="layer '0' of network 1 shares its numbers with layer '0' of network 0"):
        to_modules(from_modules([mlp(), mlp()]), [network := mlp(), network])


def with_norms(bias=True, affine=True):
    """A trained-looking CNN with BatchNorm: no statistic at its initial value."""
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=bias), nn.BatchNorm2d(4, affine=affine), nn.ReLU(), nn.Dropout(), nn.Flatten(),
        nn.Linear(4 * 9, 5, bias=bias), nn.BatchNorm1d(5, eps=1e-3, affine=affine), nn.Tanh(), nn.Linear(5, 3),
    )  # fmt: skip
    for x in network.state_dict().values():
        if x.is_floating_point():
            x.uniform_(0.5, 1.5)
    return network.eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_folded(bias, affine):
    network = with_norms(bias, affine)
    features = from_modules(network)
    folded = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3))
    to_modules(features, folded)
    x = torch.randn(7, 2, 5, 5)
    torch.testing.assert_close(folded(x), network(x))
    other = with_norms(bias, affine)
    to_modules(features, other)
    torch.testing.assert_close(other(x), network(x))
    assert_same(from_modules(other), features)


def same_state(found, expected):
    assert list(found) == list(expected)
    for key in expected:
        assert found[key].dtype == expected[key].dtype
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("make", [mlp, cnn, lambda: mlp(bias=False)])
def test_state_dict_round_trip(make):
    states = [make().state_dict() for _ in range(3)]
    features = from_state_dicts(states)
    for found, expected in zip(to_state_dicts(features, states[0]), states, strict=True):
        same_state(found, expected)
        assert type(found) is OrderedDict and found._metadata == expected._metadata
    for found, expected in zip(to_state_dicts(features, states), states, strict=True):
        same_state(found, expected)
    assert_same(from_state_dicts(to_state_dicts(features)), features)


def test_state_dicts_and_modules_give_the_same_features():
    network = with_norms()
    network[6].eps = 1e-5  # a state_dict does not tell it
    assert_same(from_state_dicts(network.state_dict(), eps=1e-5), from_modules(network))
    (state,) = to_state_dicts(from_modules(network), network.state_dict(), eps=1e-5)
    assert_same(from_state_dicts(state, eps=1e-5), from_modules(network))


def test_an_assumed_eps_is_said(tmp_path, recwarn):
    state = with_norms().state_dict()
    from_state_dicts(state, eps=1e-5)
    from_state_dicts(mlp().state_dict())
    assert not recwarn
    with pytest.warns(UserWarning, match="a state_dict does not hold the eps of its BatchNorms; assumed 1e-05"):
        features = from_state_dicts(state)
    with pytest.warns(UserWarning, match="assumed 1e-05"):
        to_state_dicts(features, state)
    with pytest.warns(UserWarning, match="assumed 1e-05"):
        to_safetensors(features, tmp_path / "a.safetensors", state)
    with pytest.warns(UserWarning, match="assumed 1e-05"):
        from_safetensors(tmp_path / "a.safetensors")


def test_keys_of_other_names():
    state = mlp().state_dict()
    names = {"a": "2.weight", "b": "2.bias", "c": "0.weight", "d": "0.bias"}
    foreign = {name: state[key] for name, key in names.items()} | {"step": torch.tensor(3)}
    expected = from_state_dicts(state)
    for keys in (names | {"step": None}, lambda key: names.get(key)):
        assert_same(from_state_dicts(foreign, keys=keys, layers=["0", "2"]), expected)
        (found,) = to_state_dicts(expected, foreign, keys=keys, layers=["0", "2"])
        same_state(found, foreign)


@pytest.mark.parametrize("make", [mlp, cnn, lambda: mlp(bias=False)])
def test_safetensors_round_trip(make, tmp_path):
    states = [make().state_dict() for _ in range(2)]
    features = from_state_dicts(states)
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    to_safetensors(features, files, states[0])
    assert_same(from_safetensors(files), features)
    for file, state in zip(files, states, strict=True):
        same_state(read_safetensors(file), state)
    copies = [tmp_path / "c.safetensors", tmp_path / "d.safetensors"]
    to_safetensors(features, copies, files[0])
    for file, state in zip(copies, states, strict=True):
        same_state(read_safetensors(file), state)


def test_safetensors_of_others_are_read_in_natural_order(tmp_path):
    from safetensors.torch import save_file

    widths = list(range(3, 16))
    state = nn.Sequential(*(nn.Linear(n, n + 1) for n in widths)).state_dict()
    save_file(state, tmp_path / "deep.safetensors")
    assert_same(from_safetensors(tmp_path / "deep.safetensors"), from_state_dicts(state))


def test_safetensors_keep_an_order_that_names_do_not_tell(tmp_path):
    state = {f"{name}.{role}": x for name, (_, layer) in zip("zya", mlp().named_children(), strict=True)
             for role, x in layer.state_dict().items()}  # fmt: skip
    file = tmp_path / "network.safetensors"
    to_safetensors(from_state_dicts(state), file, state)
    assert_same(from_safetensors(file), from_state_dicts(state))
    same_state(read_safetensors(file), state)


def square_layers(count=3):
    """Layers that any order fits, so that only their numbers tell a wrong one."""
    return {f"{i}.{role}": x for i in range(count) for role, x in nn.Linear(4, 4).state_dict().items()}


def test_safetensors_keep_the_order_that_layers_gives(tmp_path):
    state, layers = square_layers(), ["2", "0", "1"]
    features = from_state_dicts(state, layers=layers)
    file = tmp_path / "network.safetensors"
    to_safetensors(features, file, state, layers=layers)
    assert_same(from_safetensors(file), features)


@pytest.mark.parametrize("written_here", [True, False])
def test_safetensors_keep_the_order_of_keys_without_a_dot(written_here, tmp_path):
    from safetensors.torch import save_file

    names = {f"w{i}": f"{i}.weight" for i in range(12)} | {f"b{i}": f"{i}.bias" for i in range(12)}
    state = square_layers(12)
    foreign = {name: state[key] for name, key in names.items()} | {"step": torch.tensor(3)}
    layers = None
    if written_here:  # in an order that no name tells
        layers = [str(i) for i in reversed(range(12))]
    features = from_state_dicts(foreign, keys=names | {"step": None}, layers=layers)
    file = tmp_path / "network.safetensors"
    if written_here:
        to_safetensors(features, file, foreign, keys=names | {"step": None}, layers=layers)
    else:
        save_file(foreign, file)
    assert_same(from_safetensors(file, keys=names | {"step": None}), features)
    assert read_safetensors(file).keys() == foreign.keys()


def test_safetensors_errors(tmp_path, monkeypatch):
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        from_safetensors(tmp_path / "broken.safetensors")
    with pytest.raises(FileNotFoundError, match="absent"):
        from_safetensors(tmp_path / "absent.safetensors")
    with pytest.raises(ValueError, match="1 networks of features cannot be written into 2 files"):
        to_safetensors(from_modules(mlp()), [tmp_path / "a", tmp_path / "b"])
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=escape("pip install magep-fast[safetensors]")):
        from_safetensors(tmp_path / "broken.safetensors")


class ForeignFeatures:
    """What nfn's WeightSpaceFeatures looks like."""

    def __init__(self, weights, biases):
        self.weights, self.biases = weights, biases


def foreign_features(channels, kernels=((), (), ())):
    widths = (2, 5, 4, 3)
    return ForeignFeatures(
        tuple(torch.randn(2, channels, n, m, *k) for m, n, k in zip(widths, widths[1:], kernels, strict=False)),
        tuple(torch.randn(2, channels, n) for n in widths[1:]),
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kernels", [((), (), ()), ((3, 2), (1, 1), ()), ((5,), (), ())])
def test_nfn_round_trip(channels, kernels):
    foreign = foreign_features(channels, kernels)
    features = from_nfn(foreign)
    features.check(features.space, channels)
    back = to_nfn(features, foreign)
    assert type(back) is ForeignFeatures
    again = from_nfn(back)
    for x, y, z, u in zip(
        foreign.weights + foreign.biases,
        back.weights + back.biases,
        features.tensors(),
        again.tensors(),
        strict=True,
    ):
        assert torch.equal(x, y)
        assert y.data_ptr() == z.data_ptr() == u.data_ptr()  # ours to theirs and back is no copy
        if channels == 1 or x.dim() <= 4:
            assert x.data_ptr() == z.data_ptr()  # nor is theirs to ours
    if kernels[0] == (3, 2):  # channel outermost, then kernel rows
        assert torch.equal(features.weights[0][:, -2], foreign.weights[0][:, -1, :, :, 2, 0])


def test_objects_of_nfn():
    nfn = pytest.importorskip("nfn.common", reason="needs nfn: pip install .[bench]")
    networks = [mlp(), mlp()]
    states = [network.state_dict() for network in networks]
    theirs = [nfn.state_dict_to_tensors(state) for state in states]
    foreign = nfn.WeightSpaceFeatures(
        [torch.stack(x) for x in zip(*(w for w, _ in theirs), strict=True)],
        [torch.stack(x) for x in zip(*(b for _, b in theirs), strict=True)],
    )
    assert_same(from_nfn(foreign), from_modules(networks))
    back = to_nfn(from_modules(networks), nfn.WeightSpaceFeatures)
    for (w, b), (x, y) in zip(back, foreign, strict=True):
        assert torch.equal(w, x) and torch.equal(b, y)


def test_to_nfn_needs_kernels_for_taps():
    features = random_features(WeightSpace((2, 4, 3), (9, 1)))
    assert to_nfn(features, ForeignFeatures, [(3, 3), ()]).weights[0].shape == (2, 2, 4, 2, 3, 3)
    with pytest.raises(ValueError, match=escape("layer 1 has 9 weights per connection; kernels of shape () have 1")):
        to_nfn(features, ForeignFeatures)
    with pytest.raises(ValueError, match=escape("kernels must list one shape per layer (2)")):
        to_nfn(features, ForeignFeatures, [(3, 3)])


@pytest.mark.parametrize("space", [WeightSpace((2, 5, 4, 3)), WeightSpace((2, 4, 3), (9, 2))])
def test_dwsnets_round_trip(space):
    features = random_features(space, channels=3)
    weights, biases = to_dwsnets(features)
    assert weights[0].shape == (2, 2, space.widths[1], 3 * space.taps[0])
    assert biases[0].shape == (2, space.widths[1], 3)
    assert torch.equal(weights[0][1, 0, 3, 2], features.weights[0][1, 2, 3, 0])
    back = from_dwsnets((weights, biases))
    assert_same(back, features)
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(back.tensors(), features.tensors(), strict=True))


LAYOUT = [
    ZooEntry("sequential/conv2d/bias:0", 0, 4, (4,)),
    ZooEntry("sequential/conv2d/kernel:0", 4, 4 + 72, (3, 3, 2, 4)),
    ZooEntry("sequential/dense/kernel:0", 76, 76 + 72, (24, 3)),
    ZooEntry("sequential/dense/bias:0", 148, 151, (3,)),
]


def test_zoo_round_trip(tmp_path):
    rows = torch.randn(5, 151)
    features = from_zoo_rows(rows, LAYOUT)
    assert features.space == WeightSpace((2, 4, 3), (9, 6))
    assert torch.equal(to_zoo_rows(features, LAYOUT), rows)
    kernel = rows[1, 4:76].view(3, 3, 2, 4)
    assert features.weights[0][1, 3 * 1 + 2, 3, 1] == kernel[1, 2, 1, 3]
    dense = rows[1, 76:148].view(6, 4, 3)  # TensorFlow flattens positions before channels
    assert features.weights[1][1, 5, 2, 3] == dense[5, 3, 2]
    csv = ["varname,start_idx,end_idx,size,shape"]
    csv += [f'{x.varname},{x.start},{x.end},{x.end - x.start},"{x.shape}"' for x in LAYOUT]
    (tmp_path / "layout.csv").write_text("\n".join(csv) + "\n")
    assert read_zoo_layout(tmp_path / "layout.csv") == LAYOUT
    assert_same(from_zoo_rows(rows.numpy(), tmp_path / "layout.csv"), features)
    assert_same(from_zoo_rows(rows[1], LAYOUT), features[1])


def test_no_zoo_rows_are_a_batch_of_none():
    features = from_zoo_rows(torch.empty(0, 151), LAYOUT)
    assert features.batch_size == 0 and features.space == WeightSpace((2, 4, 3), (9, 6))
    assert to_zoo_rows(features, LAYOUT).shape == (0, 151)


def test_zoo_without_bias():
    layout = [ZooEntry("a/kernel:0", 0, 6, (2, 3)), ZooEntry("b/kernel:0", 6, 9, (3, 1))]
    rows = torch.randn(2, 9)
    features = from_zoo_rows(rows, layout)
    assert torch.equal(to_zoo_rows(features, layout), rows)
    with pytest.raises(ValueError, match="'a/kernel:0' has no bias in the layout but the features have one"):
        to_zoo_rows(WeightFeatures(features.weights, [b + 1 for b in features.biases]), layout)


@pytest.mark.parametrize(
    ("rows", "layout", "message"),
    [
        (torch.zeros(2, 150), LAYOUT, "rows have 150 numbers; the layout describes 151"),
        (torch.zeros(2, 151, dtype=torch.int), LAYOUT, "expected floating point numbers [N, numbers]"),
        (torch.zeros(2, 75), LAYOUT[1:2], "stands at 4 … 76; expected 72 numbers from 0 on"),
        (torch.zeros(2, 4), LAYOUT[:1], "layer 'sequential/conv2d' of the layout has no kernel:0"),
        (torch.zeros(2, 4), [], "the layout is empty"),
        (torch.zeros(2, 4), [ZooEntry("a/gamma:0", 0, 4, (4,))], "'a/gamma:0' of the layout is neither"),
        (torch.zeros(2, 4), [ZooEntry("a/kernel:0", 0, 4, (4,))], "has shape (4,); expected [kh, kw, in, out]"),
        (
            torch.zeros(2, 10),
            [ZooEntry("a/kernel:0", 0, 4, (2, 2)), ZooEntry("b/kernel:0", 4, 10, (6, 1))],
            "layer 'b' reads 6 features but the layer before it gives 2",
        ),
    ],
)
def test_zoo_errors(rows, layout, message):
    with pytest.raises(ValueError, match=escape(message)):
        from_zoo_rows(rows, layout)


def broken(**changes):
    """The state_dict of an MLP 3-5-2 with entries replaced, or removed where None."""
    state = dict(mlp().state_dict()) | {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({}, ValueError, "network 0: the state_dict has no layer: 0 entries"),
        (broken(**{"0__weight": None}), ValueError, "layer '0' has ['bias'] but no weight; expected a key '0.weight'"),
        (broken(**{"0__weight": torch.zeros(6, 3)}), ValueError, "'0.bias' is (5,); expected (6,)"),
        (broken(**{"2__weight": torch.zeros(2, 6)}), ValueError, "reads 6 features but the layer before it gives 5"),
        (broken(**{"0__scale": torch.zeros(5)}), ValueError, "leave it out with keys={'0.scale': None}"),
        (broken(**{"0__weight": torch.zeros(5, 3, dtype=torch.int)}), ValueError, "'0.weight' is torch.int32"),
        (broken(**{"0__weight": torch.zeros(5, 3, dtype=torch.half)}), ValueError, "layer '0': found torch.float32"),
        (broken(**{"0__weight": torch.zeros(5)}), ValueError, "a normalisation without running statistics"),
        (broken(**{"0__weight": torch.tensor(5.0)}), ValueError, "'0.weight' is (); expected [n_out, n_in]"),
        (broken(**{"0__bias": torch.zeros(5, 1)}), ValueError, "'0.bias' is (5, 1); expected one number per neuron"),
        (broken(**{"0__running_var": torch.zeros(5)}), ValueError, "BatchNorm '0' stands in front of the first layer"),
        (broken(**{"2__running_var": torch.zeros(5)}), ValueError, "but no running_mean"),
        (broken(**{"0__weight": [1.0]}), TypeError, "'0.weight' is list; expected a tensor"),
        (broken(**{"0__weight": torch.zeros(5, 3).to_sparse()}), ValueError, "torch.sparse_coo; expected"),
        (broken(**{"0__weight": torch.zeros(5, 0)}), ValueError, "reads 0 features"),
        ({3: torch.zeros(2, 2)}, TypeError, "key 3 is int; expected a str"),
    ],
)
def test_state_dict_errors(state, error, message):
    with pytest.raises(error, match=escape(message)):
        from_state_dicts([state])


def test_arguments_that_are_no_networks():
    with pytest.raises(TypeError, match="found str; expected a state_dict"):
        from_state_dicts(["0.weight"])
    with pytest.raises(TypeError, match="found int; expected an nn"):
        from_modules([3])
    with pytest.raises(ValueError, match="from_state_dicts needs at least one network"):
        from_state_dicts([])
    with pytest.raises(ValueError, match="does not list each layer of the state_dict once; it has \\['0', '2'\\]"):
        from_state_dicts(mlp().state_dict(), layers=["0"])
    with pytest.raises(ValueError, match=r"key '2\.weight' is a second '0\.weight'"):
        from_state_dicts(mlp().state_dict(), keys={"2.weight": "0.weight"})


tensors = st.builds(
    lambda shape, dtype, fill: torch.full(shape, fill).to(dtype),
    st.lists(st.integers(0, 4), max_size=6),
    st.sampled_from([torch.float32, torch.float64, torch.half, torch.int64, torch.bool, torch.complex64]),
    st.sampled_from([0.0, 1.0, float("nan"), float("inf"), 3e38]),
)
names = st.sampled_from(["0", "2", "norm", "a.b", ""])
roles = st.sampled_from(["weight", "bias", "running_mean", "running_var", "num_batches_tracked", "scale", ""])
entries = st.dictionaries(st.builds("{}.{}".format, names, roles), st.none() | tensors | st.just(3), max_size=5)


@given(entries, st.booleans())
def test_fuzzed_state_dicts_are_converted_or_refused(changes, from_scratch):
    state = changes if from_scratch else broken(**{key.replace(".", "__"): x for key, x in changes.items()})
    try:
        features = from_state_dicts(state)
    except (TypeError, ValueError) as error:
        assert len(str(error)) > 20
        return
    (found,) = to_state_dicts(features, state)
    assert list(found) == list(state)
    assert_same(from_state_dicts(found), features)


def test_a_huge_state_dict_is_an_error_of_memory():
    state = {"0.weight": torch.zeros(1).expand(2**22, 2**22)}  # 64 TiB
    with pytest.raises(RuntimeError, match=r"allocate|memory"):
        from_state_dicts(state)
