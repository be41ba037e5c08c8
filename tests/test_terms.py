from re import escape

import pytest
import torch

from magep_fast import ABLATION, GroupElement, MagepEquivariant, MagepInvariant, MonomialEquivariant, WeightSpace
from magep_fast.terms import GROUPS, INTER_LAYER, LINEAR, NAMES, select_terms
from tests.helpers import assert_same, random_features, tensors_of

N_0, N_L, D, E = 2, 3, 5, 7


def deep_space(num_layers):
    return WeightSpace((N_0, *range(4, 3 + num_layers), N_L))


def shapes_of_weight(i, L):
    if i == 1:
        return dict.fromkeys(("W", "WW", "bW"), (E, D, N_0, N_0)) | {"b": (E, D, N_0)}
    return dict.fromkeys(("W", "WW", "bW"), (E, D, N_L, N_L) if i == L else (E, D))


def shapes_of_hidden_bias(i):
    shapes = dict.fromkeys(("W" if i == 1 else "W_prod", "WW", "bW"), (E, D, N_0)) | {"b": (E, D)}
    return shapes | {"Wb": (E, D, i - 1)} if i > 1 else shapes


def shapes_of_readout(L, own):
    """`own` is the output's own index: (n_L,) for the last bias, () for the invariant layer."""
    return dict.fromkeys(("W_prod", "WW", "bW"), (E, D, N_L, N_0, *own)) | {
        "Wb": (E, D, L - 1, N_L, *own),
        "b": (E, D, N_L, *own),
        "WW_pp": (E, D, L - 1, *own),
        "bW_pp": (E, D, L - 1, *own),
        "1": (E, *own),
    }


def equivariant_shapes(L):
    shapes = {}
    for i in range(1, L + 1):
        shapes["weight", i] = shapes_of_weight(i, L)
        shapes["bias", i] = shapes_of_readout(L, (N_L,)) if i == L else shapes_of_hidden_bias(i)
    return shapes


@pytest.mark.parametrize("L", [2, 3, 5])
def test_coefficients_have_the_shapes_of_the_paper(L):
    layer = MagepEquivariant(deep_space(L), D, E)
    for (output, i), shapes in equivariant_shapes(L).items():
        found = {term: tuple(layer.coefficient(term, i, output).shape) for term in shapes}
        assert found == shapes
        terms = layer.table.outputs[layer.table.output_index(f"{output}_{i}")].terms
        assert {term.name for term in terms} == set(shapes)


@pytest.mark.parametrize("L", [2, 3, 5])
def test_invariant_coefficients_have_the_shapes_of_the_paper(L):
    layer = MagepInvariant(deep_space(L), D, E)
    shapes = shapes_of_readout(L, ())
    assert {term: tuple(layer.coefficient(term).shape) for term in shapes} == shapes
    assert {term.name for term in layer.table.outputs[0].terms} == set(shapes)


@pytest.mark.parametrize("L", [2, 3, 5])
def test_connections_are_indexed_by_the_pairs_of_the_paper(L):
    equivariant, invariant = MagepEquivariant(deep_space(L), D, E), MagepInvariant(deep_space(L), D, E)
    traces = {(s, s) for s in range(1, L)}
    neighbours = {(i, i - 1) for i in range(1, L + 1)}
    inputs = {(i, 0) for i in range(1, L + 1)}
    for layer, pairs in ((equivariant, inputs | neighbours | traces), (invariant, {(L, 0)} | traces)):
        assert set(layer.table.pairs) == pairs and len(layer.table.pairs) == len(pairs)
        for s, t in pairs:
            assert layer.connection("WW", s, t).shape == (D, N_0, N_L)
            assert layer.connection("bW", s, t).shape == (D, N_L)


def all_views(layer):
    """Every coefficient and connection, each beside the parameter it is a view of."""
    for output in layer.table.outputs:
        matrix = getattr(layer, output.name)
        yield from ((view, matrix) for view in output.coefficients(matrix).values())
    yield from ((view, layer.psi) for view in layer.table.connections(layer.psi).values())


@pytest.mark.parametrize("kind", [MagepEquivariant, MagepInvariant])
def test_views_cover_every_stored_number_once(kind):
    layer = kind(deep_space(3), D, E)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        for view, parameter in all_views(layer):
            assert view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
            view.add_(1)
    for parameter in layer.parameters():
        assert torch.equal(parameter, torch.ones_like(parameter))


@pytest.mark.parametrize("kind", [MagepEquivariant, MagepInvariant])
def test_writing_into_a_coefficient_changes_the_output(kind):
    layer = kind(deep_space(3), D, E, dtype=torch.float64)
    features = random_features(deep_space(3), D)
    with torch.no_grad():
        for view, _ in all_views(layer):
            before = tensors_of(layer(features))
            view.add_(1)
            after = tensors_of(layer(features))
            assert any((x - y).abs().max() > 1e-6 for x, y in zip(before, after, strict=True))


def test_state_dict_keys():
    names = ["weight_1", "bias_1", "weight_2", "bias_2", "psi"]
    assert list(MagepEquivariant(deep_space(2), D, E).state_dict()) == names
    assert list(MagepInvariant(deep_space(2), D, E).state_dict()) == ["invariant", "psi"]
    assert "psi" not in MagepEquivariant(deep_space(2), D, E, terms="linear").state_dict()


@pytest.mark.parametrize("kind", [MagepEquivariant, MagepInvariant])
def test_parameters_do_not_know_the_hidden_widths(kind):
    shapes = [
        {name: value.shape for name, value in kind(space, D, E).state_dict().items()}
        for space in (WeightSpace((2, 4, 5, 3)), WeightSpace((2, 40, 1, 3)), WeightSpace((2, None, None, 3)))
    ]
    assert shapes[0] == shapes[1] == shapes[2]


def test_layer_with_open_widths_computes_the_same():
    space = deep_space(3)
    known, open_ = (MagepEquivariant(s, D, E, dtype=torch.float64) for s in (space, space.any_hidden_width()))
    open_.load_state_dict(known.state_dict())
    features = random_features(space, D)
    assert_same(open_(features), known(features))


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ("all", set(NAMES)),
        ("linear", {"W", "b", "1"}),
        ("inter-layer", set(NAMES) - {"W", "b", "1"}),
        ("WW", {"WW"}),
        ({"W", "b"}, {"W", "b"}),
        (["linear", "Wb"], {"W", "b", "1", "Wb"}),
        (frozenset({"linear", "inter-layer"}), set(NAMES)),
    ],
)
def test_select_terms(terms, expected):
    assert select_terms(terms) == expected


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ("everything", "terms: 'everything' is unknown; expected 'all', 'linear', 'inter-layer' or a set of"),
        ({"W", "Ww"}, "terms: 'Ww' is unknown"),
        ((), "terms must not be empty"),
    ],
)
def test_select_terms_refuses(terms, message):
    with pytest.raises(ValueError, match=escape(message)):
        select_terms(terms)


def test_groups_split_the_names():
    assert LINEAR | INTER_LAYER == set(NAMES) == GROUPS["all"] and not LINEAR & INTER_LAYER


@pytest.mark.parametrize("row", ABLATION)
def test_ablation_rows_respect_the_group(row):
    space = deep_space(4)
    features = random_features(space, D)
    g = GroupElement.sample(space)
    equivariant = MagepEquivariant(space, D, E, terms=ABLATION[row], dtype=torch.float64)
    invariant = MagepInvariant(space, D, E, terms=ABLATION[row], dtype=torch.float64)
    assert_same(equivariant(g @ features), g @ equivariant(features), 1e-12)
    assert_same(invariant(g @ features), invariant(features), 1e-12)
    assert equivariant(features).weights[0].all() and invariant(features).all()


def test_ablation_rows_differ_and_end_with_all():
    assert len(set(ABLATION.values())) == len(ABLATION) == 7
    assert list(ABLATION.values())[-1] == select_terms("all")


@pytest.mark.parametrize("term", NAMES)
def test_only_the_chosen_term_has_coefficients(term):
    layer = MagepEquivariant(deep_space(3), D, E, terms=term)
    names = {term.name for output in layer.table.outputs for term in output.terms}
    assert names == {term}
    assert (layer.psi is not None) == (term in {"WW", "bW", "WW_pp", "bW_pp"})


def test_unknown_names_of_coefficients_are_named():
    layer = MagepEquivariant(deep_space(2), D, E, terms="linear")
    with pytest.raises(KeyError, match="weight_2 has no term 'WW'; it has"):
        layer.coefficient("WW", 2)
    with pytest.raises(KeyError, match="no output 'weight_3'; there are"):
        layer.coefficient("W", 3)
    with pytest.raises(KeyError, match="no connection"):
        layer.connection("WW", 1, 0)


@pytest.mark.parametrize("kind", [MagepEquivariant, MagepInvariant])
def test_products_of_layers_need_one_weight_per_connection(kind):
    with pytest.raises(ValueError, match="products of layers need one weight per connection; found WeightSpace"):
        kind(WeightSpace((2, 4, 3), (9, 1)), D, E)


def test_taps_join_the_channels_of_the_coefficients():
    layer = MonomialEquivariant(WeightSpace((2, 4, 5, 3), (9, 4, 1)), D, E, out_taps=(1, 6, 2))
    assert layer.coefficient("W", 1).shape == (E, D * 9, 2, 2)
    assert layer.coefficient("W", 2).shape == (E * 6, D * 4)
    assert layer.coefficient("W", 3).shape == (E * 2, D, 3, 3)
    assert layer.coefficient("W", 1, "bias").shape == (E, D * 9, 2)
    assert layer.coefficient("b", 2, "bias").shape == (E, D)
