"""Nothing is imported upwards: the floors of the house, written down here and nowhere else."""

import ast
from fnmatch import fnmatchcase
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("magep_fast", "triton_kernels", "benchmarks", "examples", "tests")

FLOORS = {
    "kernels": "triton_kernels triton_kernels.*",
    "networks": "magep_fast.spaces magep_fast.activations",
    "what is known of networks": "magep_fast.terms magep_fast.symmetry magep_fast.convert magep_fast.ragged "
    "magep_fast.permutation magep_fast.authors",
    "the layers in torch ops": "magep_fast.reference magep_fast.factored",
    "backends": "magep_fast.ops.library magep_fast.ops.autocast magep_fast.ops.backends magep_fast.ops.operations "
    "magep_fast.ops.native magep_fast.ops.triton magep_fast.ops.cuda",
    "operations": "magep_fast.ops magep_fast.ops.chain magep_fast.ops.equivariant magep_fast.ops.invariant "
    "magep_fast.ops.stack",
    "layers": "magep_fast.layers magep_fast.stack magep_fast.training_step",
    "models": "magep_fast.models magep_fast.swap",
    "public names": "magep_fast",
    "what is built": "magep_fast.info",
    "measuring": "benchmarks benchmarks.commands benchmarks.measure benchmarks.report benchmarks.floor "
    "benchmarks.training",
    "rivals and data": "benchmarks.peers benchmarks.peers.* benchmarks.data benchmarks.data.*",
    "benchmarks": "benchmarks.layers benchmarks.bench_layers benchmarks.scaling benchmarks.compile "
    "benchmarks.cuda_model benchmarks.model benchmarks.tables benchmarks.tables_report benchmarks.process_peak",
    "tasks": "benchmarks.tasks benchmarks.tasks.*",
    "commands": "benchmarks.__main__",
    "examples": "examples examples.*",
    "tests": "tests tests.*",
}
"""From the ground up. A module may import from its own floor and from those below, and no imports form a circle."""

MODULES_OF_TORCH = "magep_fast.layers magep_fast.stack magep_fast.training_step magep_fast.models magep_fast.swap"

STRANGERS = (
    ("triton_kernels*", "magep_fast*"),  # kernels know nothing of modules
    # Nor modules of kernels.
    (MODULES_OF_TORCH, "triton_kernels* magep_fast.ops.native magep_fast.ops.triton magep_fast.ops.cuda"),
    (MODULES_OF_TORCH, "magep_fast.reference magep_fast.factored"),
    ("magep_fast.reference", "magep_fast.factored magep_fast.ops*"),  # the judge owes nothing to those it judges
    ("examples*", "benchmarks*"),
)
"""(who, whom): modules that must not import one another although floors would let them."""


def matches(module, patterns):
    return any(fnmatchcase(module, pattern) for pattern in patterns.split())


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def imported(path):
    """Modules of this repository that a file imports anywhere, with the names it takes from each."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found += [(node.module, alias.name) for alias in node.names]
    # Where the kernels are installed.
    found = [(module.replace("magep_fast.triton_kernels", "triton_kernels"), name) for module, name in found]
    return [
        (f"{module}.{name}", "") if f"{module}.{name}" in MODULES else (module, name)
        for module, name in found
        if module.partition(".")[0] in PACKAGES
    ]


IMPORTS = {module: imported(path) for module, path in MODULES.items()}


def floor(module):
    """The number of a module's floor."""
    found = [number for number, patterns in enumerate(FLOORS.values()) if matches(module, patterns)]
    assert len(found) == 1, f"{module} is on {len(found)} floors; give it one"
    return found[0]


def test_every_module_has_a_floor_and_every_floor_has_modules():
    assert {floor(module) for module in MODULES} == set(range(len(FLOORS)))
    for patterns in FLOORS.values():
        for pattern in patterns.split():
            assert any(fnmatchcase(module, pattern) for module in MODULES), f"no module is {pattern}"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_imported_upwards(module):
    names = list(FLOORS)
    for other, _ in IMPORTS[module]:
        above, below = names[floor(other)], names[floor(module)]
        assert floor(other) <= floor(module), f"{module} ({below}) imports {other} ({above})"
        for who, whom in STRANGERS:
            assert not (matches(module, who) and matches(other, whom)), f"{module} must know nothing of {other}"


def test_no_imports_form_a_circle():
    TopologicalSorter({module: {other for other, _ in IMPORTS[module]} - {module} for module in MODULES}).prepare()


def test_private_names_stay_in_their_module():
    private = [
        f"{module} imports {other}.{name}"
        for module, names in IMPORTS.items()
        for other, name in names
        if name.startswith("_")
    ]
    assert not private
