import pickle
from copy import deepcopy
from re import escape

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from examples.authors_layers import (
    Coefficient,
    HNPSLinear,
    HNPSMixerInv,
    HNPSMixerLinear,
    NetworkSpec,
    TupleOp,
    WeightSpaceFeatures,
)
from magep_fast import (
    MagepEquivariant,
    MagepInvariant,
    MonomialEquivariant,
    WeightFeatures,
    WeightSpace,
    accelerate,
    load_authors_state_dict,
    to_authors_state_dict,
    use_backend,
)
from magep_fast.swap import FusedLayer, Left, Replaced
from tests.helpers import assert_same

MLP = NetworkSpec.of((2, 5, 4, 3))
CNN = NetworkSpec.of((1, 5, 4, 6, 3), [(3, 3), (3, 2), (1, 1), ()])
POINTS = NetworkSpec.of((1, 5, 4, 6, 3), [(1, 1), (1, 1), (1, 1), ()])
"""CNN's widths with one weight per connection, still as kernels."""


def mlp_model():
    return nn.Sequential(
        HNPSMixerLinear(MLP, 1, 4),
        TupleOp(torch.sin),
        HNPSMixerLinear(MLP, 4, 4),
        TupleOp(nn.Tanh()),
        HNPSMixerInv(MLP, 4, 6),
        nn.Linear(6, 2),
    )


def cnn_model(out=POINTS):
    return nn.Sequential(
        HNPSLinear(CNN, out, 1, 4),
        TupleOp(nn.ReLU()),
        HNPSMixerLinear(out, 4, 4),
        TupleOp(torch.relu),
        HNPSMixerInv(out, 4, 6),
        nn.Linear(6, 2),
    )


def networks(spec, channels=1, batch=3, dtype=torch.float32, cls=WeightSpaceFeatures):
    return cls(
        tuple(0.5 * torch.randn(batch, channels, *s.shape, dtype=dtype) for s in spec.weight_spec),
        tuple(torch.randn(batch, channels, *s.shape, dtype=dtype) for s in spec.bias_spec),
    )


def flat_networks(spec, **options):
    """As leaf tensors, so that gradients by the networks themselves can be compared."""
    x = networks(spec, **options)
    return type(x)(*([y.requires_grad_() for y in part] for part in (x.weights, x.biases)))


MODELS = [(mlp_model, MLP), (cnn_model, CNN), (lambda: cnn_model(NetworkSpec.of((1, 5, 4, 6, 3))), CNN)]


def assert_model_is_the_same(old, new, spec, tolerance=2e-5):
    """Outputs, gradients by the networks and by every parameter, the latter under the authors' names."""
    x = flat_networks(spec)
    results = []
    for model in (old, new):
        out = model(x)
        model.zero_grad()
        inputs = torch.autograd.grad(out.square().sum(), [*x.weights, *x.biases], retain_graph=True)
        out.square().sum().backward()
        results.append((out, inputs))
    (found, by_found), (expected, by_expected) = results[1], results[0]
    assert_same(found, expected, tolerance)
    for a, b in zip(by_found, by_expected, strict=True):
        assert_same(a, b, tolerance)
    gradients = deepcopy(new)
    for parameter, source in zip(gradients.parameters(), new.parameters(), strict=True):
        parameter.data = torch.zeros_like(source) if source.grad is None else source.grad
    translated = to_authors_state_dict(gradients)
    for name, parameter in old.named_parameters():
        if parameter.grad is not None:
            assert_same(translated[name], parameter.grad, tolerance)


@pytest.mark.parametrize(("make", "spec"), MODELS)
def test_accelerated_model_is_the_same_model(make, spec):
    model = make()
    report = accelerate(model, copy=True)
    assert report.model is not model
    assert_model_is_the_same(model, report.model, spec)


@pytest.mark.parametrize(("make", "spec"), MODELS)
def test_in_place_on_every_backend(make, spec):
    model = make()
    expected = deepcopy(model)
    assert accelerate(model).model is model
    for backend in ("reference", "torch"):
        with use_backend(backend):
            assert_model_is_the_same(expected, model, spec)


def test_report_is_exact():
    model = nn.ModuleDict({"net": mlp_model(), "other": MagepInvariant(WeightSpace((2, 5, 1)), 1, 1)})
    report = accelerate(model)
    space = "WeightSpace(2-*-*-3)"
    frozen = "terms='all', share_Wb=True, learn_psi=False"
    assert report.replaced == (
        Replaced("net.0", "HNPSMixerLinear", f"MagepEquivariant({space}, 1 -> 4, {frozen})"),
        Replaced("net.2", "HNPSMixerLinear", f"MagepEquivariant({space}, 4 -> 4, {frozen})"),
        Replaced("net.4", "HNPSMixerInv", f"MagepInvariant({space}, 4 -> 6, terms='all', share_Wb=True)"),
        Replaced("net.1", f"TupleOp({torch.sin})", "fused into net.0"),
        Replaced("net.3", "TupleOp(Tanh())", "fused into net.2"),
    )
    assert report.left == (
        Left("net.5", "Linear", "not a layer this package knows"),
        Left("other", "MagepInvariant", "a layer of this package already"),
    )
    assert report.optimizers == ()
    text = str(report)
    assert text.splitlines()[0] == "accelerate: 5 replaced, 2 left"
    assert "+ net.4  HNPSMixerInv" in text and "- net.5  Linear" in text


@pytest.mark.parametrize(("make", "spec"), MODELS)
def test_twice_is_the_same_as_once(make, spec):
    model = make()
    accelerate(model)
    text, state = str(model), deepcopy(model.state_dict())
    again = accelerate(model)
    assert again.model is model and not again.replaced and str(model) == text
    assert {x.reason for x in again.left} == {"accelerated already", "not a layer this package knows"}
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


def test_one_layer_is_replaced_itself():
    layer = HNPSMixerInv(MLP, 2, 3)
    report = accelerate(layer)
    assert isinstance(report.model, FusedLayer)
    x = networks(MLP, channels=2)
    assert_same(report.model(x), layer(x), 1e-5)
    assert report.replaced[0].name == "" and "(the model itself)" in str(report)


def test_replacements_take_and_return_the_class_of_the_caller():
    class Mine(WeightSpaceFeatures):
        pass

    layer = accelerate(HNPSLinear(CNN, POINTS, 1, 2)).model
    out = layer(networks(CNN, cls=Mine))
    assert type(out) is Mine
    assert [w.shape[4:] for w in out.weights] == [(1, 1), (1, 1), (1, 1), ()]
    back = accelerate(HNPSLinear(POINTS, CNN, 2, 1)).model
    assert [w.shape for w in back(out).weights] == [w.shape for w in networks(CNN).weights]
    mixer = accelerate(HNPSMixerLinear(POINTS, 2, 2)).model
    assert [w.shape for w in mixer(out).weights] == [w.shape for w in out.weights]


def test_models_of_nfn():
    nfn = pytest.importorskip("nfn")
    from nfn.layers import TupleOp as RealTupleOp

    model = nn.Sequential(HNPSMixerLinear(MLP, 1, 4), RealTupleOp(nn.ReLU()), HNPSMixerInv(MLP, 4, 2))
    report = accelerate(model, copy=True)
    assert [x.name for x in report.replaced] == ["0", "2", "1"] and not report.left
    x = networks(MLP, cls=nfn.common.WeightSpaceFeatures)
    assert_same(report.model(x), model(x), 1e-5)
    assert isinstance(report.model[0](x), nfn.common.WeightSpaceFeatures)


def test_random_numbers_of_the_caller_stay_the_same():
    model = mlp_model()
    state = torch.get_rng_state()
    accelerate(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_own_layers_get_a_fast_backend():
    space = WeightSpace((2, 5, 3))
    model = nn.Sequential(MagepEquivariant(space, 1, 2, backend="reference"), MagepInvariant(space, 2, 1))
    report = accelerate(model)
    assert report.replaced == (Replaced("0", "MagepEquivariant, backend 'reference'", "backend 'auto'"),)
    assert model[0].backend == "auto" and [x.name for x in report.left] == ["1"]


def test_activations_are_fused_only_where_that_is_safe():
    class Other(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x)), self[0](x)

    hooked = TupleOp(nn.ReLU())
    hooked.register_forward_hook(lambda *_: None)
    shared = HNPSMixerLinear(MLP, 1, 1)
    model = nn.ModuleList(
        [
            Other(HNPSMixerLinear(MLP, 1, 1), TupleOp(nn.ReLU())),
            nn.Sequential(HNPSMixerLinear(MLP, 1, 1), TupleOp(nn.LeakyReLU())),
            nn.Sequential(HNPSMixerLinear(MLP, 1, 1), hooked),
            nn.Sequential(shared, TupleOp(nn.ReLU()), shared),
            nn.Sequential(HNPSMixerLinear(MLP, 1, 1), TupleOp(nn.ReLU()), TupleOp(torch.tanh)),
            nn.Sequential(shared, HNPSMixerLinear(MLP, 1, 1), shared, TupleOp(nn.ReLU())),
        ]
    )
    expected = deepcopy(model)
    report = accelerate(model)
    assert [x.name for x in report.replaced if "fused into" in x.new] == ["4.1"]
    assert [x.name for x in report.left] == ["0.1", "1.1", "2.1", "3.1", "4.2", "5.3"]
    assert model[3][0] is model[3][2]
    x = networks(MLP)
    for new, old in zip(model[1:], expected[1:], strict=True):
        for a, b in zip(new(x).weights, old(x).weights, strict=True):
            assert_same(a, b, 1e-5)


def test_activations_can_be_kept():
    model = mlp_model()
    old = deepcopy(model)
    report = accelerate(model, fuse_activations=False)
    assert [x.name for x in report.replaced] == ["0", "2", "4"]
    assert [x.reason for x in report.left if x.name in "13"] == ["kept by fuse_activations=False"] * 2
    x = networks(MLP)
    for end in range(1, 5):  # code that takes part of the model sees what it saw
        assert_same(model[:end](x).weights[0], old[:end](x).weights[0], 1e-5)


def changed(change):
    layer = HNPSMixerLinear(MLP, 1, 2)
    change(layer)
    return layer


class HNPSMixerLinearOfAnotherKind(HNPSMixerLinear):
    pass


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (changed(lambda x: delattr(x, "layer_0_W_b")), "it lacks layer_0_W_b.weight"),
        (changed(lambda x: delattr(x, "layer_0_W_W")), "it has no parameter 'layer_0_W_W.weight'"),
        (changed(lambda x: x.register_buffer("scale", torch.ones(1))), "it also has scale"),
        (changed(lambda x: setattr(x, "layer_1_W_W", Coefficient(2, 2))), "its layer_1_W_W.weight is (2, 2)"),
        (changed(lambda x: setattr(x, "layer_0_W_W", nn.Linear(2, 2, False))), "other shapes than expected"),
        (changed(lambda x: x.layer_0_b_b.double()), "its parameters have several dtypes or devices"),
        (changed(lambda x: x.layer_0_b_b.requires_grad_(False)), "some of its parameters are trained and some are not"),
        (changed(lambda x: x.register_forward_hook(print)), "it has hooks"),
        (changed(lambda x: setattr(x, "forward", lambda features: features)), "it has hooks"),
        (HNPSMixerLinearOfAnotherKind(MLP, 1, 1), "not a layer this package knows"),
    ],
)  # fmt: skip
def test_layers_that_differ_are_left(layer, reason):
    before = str(layer)
    report = accelerate(nn.Sequential(layer))
    assert not report.replaced and str(report.model[0]) == before
    assert reason in report.left[0].reason


def do_nothing(*_):
    pass


@pytest.mark.parametrize(
    "add_hook",
    [
        lambda layer: layer.layer_0_b_b.weight.register_hook(do_nothing),
        lambda layer: layer.layer_0_b_b.weight.register_post_accumulate_grad_hook(do_nothing),
        lambda layer: layer.layer_0_b_b.register_state_dict_pre_hook(do_nothing),
        lambda layer: layer.register_state_dict_post_hook(do_nothing),
        lambda layer: layer.register_load_state_dict_pre_hook(do_nothing),
        lambda layer: layer.register_load_state_dict_post_hook(do_nothing),
    ],
)
def test_layers_with_hooks_of_any_kind_are_left(add_hook):
    layer = HNPSMixerLinear(MLP, 1, 1)
    add_hook(layer)
    report = accelerate(nn.Sequential(layer))
    assert report.model[0] is layer and report.left[0].reason.startswith("it has hooks")


def test_activations_with_hooks_inside_are_not_fused():
    activation = nn.ReLU()
    activation.register_forward_hook(do_nothing)
    report = accelerate(nn.Sequential(HNPSMixerLinear(MLP, 1, 1), TupleOp(activation)))
    assert report.model[1].op is activation
    assert [(x.name, x.reason.split(",")[0]) for x in report.left] == [("1", "it has hooks")]


def test_shared_parameters_are_left():
    first, second = HNPSMixerLinear(MLP, 1, 1), HNPSMixerLinear(MLP, 1, 1)
    second.layer_0_b_b.weight = first.layer_0_b_b.weight
    report = accelerate(nn.ModuleList([first, second]))
    assert [x.reason for x in report.left] == ["it shares parameters with another layer"] * 2


def test_parameters_of_a_shared_submodule_are_left():
    model = nn.Sequential(HNPSMixerLinear(MLP, 1, 1), HNPSMixerLinear(MLP, 1, 1))
    model[1].layer_1_W_W = model[0].layer_1_W_W
    report = accelerate(model)
    assert [x.reason for x in report.left] == ["it shares parameters with another layer"] * 2
    assert model[1].layer_1_W_W.weight is model[0].layer_1_W_W.weight


def test_a_layer_in_several_places_is_replaced_once():
    block = nn.Sequential(HNPSMixerLinear(MLP, 1, 1))
    model = nn.ModuleList([block, block, block[0]])
    report = accelerate(model)
    assert len(report.replaced) == 1 and not report.left
    assert isinstance(model[2], FusedLayer) and model[0][0] is model[1][0] is model[2]


def test_linear_layer_without_spec():
    layer = HNPSLinear(CNN, POINTS, 1, 2)
    x = networks(CNN)
    expected = layer(x)
    del layer.out_network_spec
    out = accelerate(layer).model(x)
    assert [w.dim() for w in out.weights] == [4] * 4
    for a, b in zip(out.weights, expected.weights, strict=True):
        assert_same(a, b.reshape(a.shape), 1e-5)
    layer = HNPSLinear(POINTS, CNN, 1, 2)
    del layer.out_network_spec
    assert "no out_network_spec with their shapes" in accelerate(layer).left[0].reason


def test_wrapped_models_are_left():
    compiled = torch.compile(mlp_model())
    report = accelerate(nn.ModuleDict({"net": compiled}))
    assert [(x.name, x.layer) for x in report.left] == [("net", "OptimizedModule")]
    assert report.left[0].reason.startswith("compiled already: accelerate the model first")


def test_optimisers_of_old_parameters_are_named():
    model, other = mlp_model(), mlp_model()
    optimizer = torch.optim.Adam(model.parameters())
    unrelated = torch.optim.SGD(other.parameters())
    with pytest.warns(UserWarning, match="Adam holds parameters that accelerate replaced: build it again"):
        report = accelerate(model)
    assert report.optimizers == (optimizer,) and unrelated not in report.optimizers
    assert "Adam(report.model.parameters(), …)" in str(report)
    assert accelerate(other, copy=True).optimizers == ()


def test_accelerate_takes_modules_only():
    with pytest.raises(TypeError, match="accelerate takes an nn"):
        accelerate("model")


@pytest.mark.parametrize(("make", "spec"), MODELS)
@pytest.mark.parametrize("copy", [deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_accelerated_models_are_copied_and_pickled(make, spec, copy):
    model = accelerate(make()).model
    x = networks(spec)
    assert_same(copy(model)(x), model(x))


@pytest.mark.parametrize(("make", "spec"), MODELS)
def test_state_dict_of_accelerated_models(make, spec, tmp_path):
    model, other = accelerate(make()).model, accelerate(make()).model
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    x = networks(spec)
    assert_same(other(x), model(x))


@pytest.mark.parametrize(("make", "spec"), MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_accelerated_models_change_dtype(make, spec, dtype):
    model = make()
    fast = accelerate(model, copy=True).model
    fast = fast.half() if dtype == torch.float16 else fast.to(dtype)
    x = networks(spec)
    out = fast(WeightSpaceFeatures([w.to(dtype) for w in x.weights], [b.to(dtype) for b in x.biases]))
    assert out.dtype == dtype
    assert_same(out.float(), model(x).float(), 1e-5 if dtype == torch.float64 else 0.1)
    assert fast.to("meta")[0].layer.weight_1.device.type == "meta"


@pytest.mark.parametrize(("make", "spec"), MODELS[:2])
def test_accelerated_models_compile(make, spec):
    model = accelerate(make()).model
    x = flat_networks(spec)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, found = model(x), compiled(x)
    assert_same(found, expected, 1e-6)
    for a, b in zip(
        torch.autograd.grad(found.sum(), x.weights), torch.autograd.grad(expected.sum(), x.weights), strict=True
    ):
        assert_same(a, b, 1e-5)


def train_in_two_processes(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = accelerate(mlp_model()).model
    shares = [networks(MLP), networks(MLP)]
    losses = [model(x).sum() for x in shares]
    wanted = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(sum(losses) / 2, wanted)
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(shares[rank]).sum().backward()
    for parameter, gradient in zip(wanted, expected, strict=True):
        assert_same(parameter.grad, gradient, 1e-5)
    assert "wrapped for distributed training" in accelerate(wrapped).left[0].reason
    torch.distributed.destroy_process_group()


def test_accelerated_models_train_under_ddp(tmp_path):
    torch.multiprocessing.spawn(train_in_two_processes, (tmp_path,), nprocs=2)


@pytest.mark.parametrize(("make", "spec"), MODELS)
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module."])
def test_checkpoints_go_both_ways(make, spec, prefix):
    theirs, ours = make(), accelerate(make()).model
    checkpoint = theirs.state_dict()
    load_authors_state_dict(ours, {prefix + key: value for key, value in checkpoint.items()})
    x = networks(spec)
    assert_same(ours(x), theirs(x), 1e-5)
    back = to_authors_state_dict(ours)
    assert back.keys() == checkpoint.keys()
    for key, value in checkpoint.items():
        assert torch.equal(back[key], value)
    make().load_state_dict(back)


def test_checkpoints_of_own_layers():
    space = WeightSpace((2, None, None, 3))
    theirs = nn.Sequential(HNPSMixerLinear(MLP, 1, 2), HNPSMixerInv(MLP, 2, 4))
    for share_Wb in (True, False):
        ours = nn.Sequential(
            MagepEquivariant(space, 1, 2, share_Wb=share_Wb), MagepInvariant(space, 2, 4, share_Wb=share_Wb)
        )
        load_authors_state_dict(ours, theirs.state_dict())
        x = networks(MLP)
        assert_same(ours(WeightFeatures(x.weights, x.biases)), theirs(x), 1e-5)
        copy = nn.Sequential(HNPSMixerLinear(MLP, 1, 2), HNPSMixerInv(MLP, 2, 4))
        copy.load_state_dict(to_authors_state_dict(ours))
        assert_same(copy(x), theirs(x))
    with torch.no_grad():
        ours[0].coefficient("Wb", 3, "bias")[:, :, 1].add_(1)
    with pytest.raises(ValueError, match=escape("layer '0': layer_2_b_Wb.weight: the layer has a coefficient of [Wb]")):
        to_authors_state_dict(ours)


def test_checkpoints_freeze_the_connections_that_the_authors_freeze():
    space = WeightSpace((2, None, None, 3))
    ours = nn.Sequential(MagepEquivariant(space, 1, 2), MagepInvariant(space, 2, 4))
    theirs = nn.Sequential(HNPSMixerLinear(MLP, 1, 2), HNPSMixerInv(MLP, 2, 4))
    load_authors_state_dict(ours, theirs.state_dict())
    assert [name for name, p in ours.named_parameters() if not p.requires_grad] == ["0.psi"]


def test_checkpoints_leave_accelerated_layers_trained_as_they_were():
    theirs = HNPSMixerLinear(MLP, 1, 2)
    ours = accelerate(deepcopy(theirs).requires_grad_()).model
    load_authors_state_dict(ours, theirs.state_dict())
    assert all(p.requires_grad for p in ours.parameters())


def test_checkpoints_of_layers_with_fewer_terms():
    space = WeightSpace((2, None, None, 3))
    layer = MagepEquivariant(space, 1, 2, terms={"W", "b", "1", "WW", "WW_pp"})
    theirs = HNPSMixerLinear(MLP, 1, 2)
    theirs.load_state_dict(to_authors_state_dict(layer))
    x = networks(MLP)
    expected = layer(WeightFeatures(x.weights, x.biases))
    assert_same(WeightFeatures(*(lambda y: (y.weights, y.biases))(theirs(x))), expected, 1e-5)
    other = MagepEquivariant(space, 1, 2, terms={"W", "b", "1", "WW", "WW_pp"})
    load_authors_state_dict(other, theirs.state_dict())
    assert_same(other(WeightFeatures(x.weights, x.biases)), expected)
    with pytest.raises(ValueError, match="is not zero but the layer was built without its term"):
        load_authors_state_dict(other, HNPSMixerLinear(MLP, 1, 2).state_dict())


def test_checkpoint_errors():
    ours = accelerate(nn.Sequential(HNPSMixerInv(MLP, 2, 4), nn.Linear(4, 1))).model
    good = to_authors_state_dict(ours)
    with pytest.raises(ValueError, match=escape("layer '0': it lacks tau_weight")):
        load_authors_state_dict(ours, {k: v for k, v in good.items() if k != "0.tau_weight"})
    with pytest.raises(ValueError, match=escape("layer '0': its layer_b.weight is (1,); expected (4, 2, 3)")):
        load_authors_state_dict(ours, good | {"0.layer_b.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        load_authors_state_dict(ours, {k: v for k, v in good.items() if k != "1.weight"})
    with pytest.raises(ValueError, match="layer '0': it lacks"):
        load_authors_state_dict(ours, {})


strays = st.sampled_from(
    [
        None,
        3,
        torch.tensor(1.0),
        torch.zeros(0),
        torch.full((4, 2, 3), torch.nan),
        torch.zeros(4, 2, 3, dtype=torch.int),
    ]
)
KEYS = ["layer_b.weight", "tau_weight", "Psi_s_0_L_s.1_1", "layer_Wb.weight", "extra", "layer_b"]


@given(st.dictionaries(st.sampled_from(KEYS), strays), st.sets(st.sampled_from(KEYS)))
def test_fuzzed_checkpoints_are_loaded_or_refused(changes, removed):
    theirs = HNPSMixerInv(MLP, 2, 4)
    checkpoint = {k: v for k, v in (theirs.state_dict() | changes).items() if k not in removed}
    model = MagepInvariant(WeightSpace((2, None, None, 3)), 2, 4)
    try:
        load_authors_state_dict(model, checkpoint)
    except (TypeError, ValueError) as error:
        assert len(str(error)) > 20
        return
    for key, value in to_authors_state_dict(model).items():
        torch.testing.assert_close(value, checkpoint[key], rtol=0, atol=0, equal_nan=True)


def test_monomial_layers_are_written_as_theirs():
    space = WeightSpace((1, 5, 4, 6, 3), (9, 6, 1, 1))
    ours = MonomialEquivariant(space, 1, 2)
    theirs = HNPSLinear(CNN, POINTS, 1, 2)
    theirs.load_state_dict(to_authors_state_dict(ours))
    x = networks(CNN)
    fast = accelerate(theirs, copy=True).model(x)
    for a, b in zip(fast.weights, theirs(x).weights, strict=True):
        assert_same(a, b, 1e-5)
