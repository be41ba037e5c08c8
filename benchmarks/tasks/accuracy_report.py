"""The report of `python -m benchmarks accuracy`: tables in the paper's form with its figures beside, and plots."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tasks import paper
from benchmarks.tasks.command import mean_and_deviation

Row = dict[str, str]
CHANGES = {"inr": "dilate", "inr-fashion": "dilate", "inr-cifar10": "contrast"}
"""What is done to the images of each data set of SIRENs."""

NOTES = "notes.md"
ORDER = ("MLP", "STATNN", "NP", "HNP", "Monomial-NFN", "path norms", "MAGEP")


def write(folder: Path, rows: list[Row]) -> None:
    """accuracy.md and its pictures; what people have to say about the runs, in notes.md, goes into it."""
    sections = ["# Accuracy", _preface(rows)]
    for activation in ("relu", "tanh"):
        plain = _of(rows, "generalization", activation)
        if plain:
            sections.append(_generalization(activation, plain))
            if any(r["augment"] != "0" for r in plain):
                picture = f"augmentation-{activation}.png"
                _draw_augmentation(folder / picture, plain)
                sections.append(f"![Kendall's τ against the range of scales]({picture})")
            sections += _ablation(plain)
    for subset in CHANGES:
        if classified := _of(rows, "inr-classify", subset):
            picture = f"classification-{subset}.png"
            _draw_bars(folder / picture, classified, "accuracy, %")
            sections += [_classification(classified), f"![accuracy of each system]({picture})"]
    for subset, change in CHANGES.items():
        if changed := _of(rows, "inr-edit", subset):
            sections.append(_editing(changed, change))
            picture = edited_picture(subset, change)
            if (folder / picture).exists():
                sections.append(
                    f"MAGEP, seed 0, first test networks: before, after, target.\n\n![edited images]({picture})"
                )
    if (folder / NOTES).exists():
        sections.append((folder / NOTES).read_text().strip())
    sections.append(_all_runs(rows))
    (folder / "accuracy.md").write_text("\n\n".join(sections) + "\n")


def edited_picture(subset: str, change: str) -> str:
    """The name of the picture of what MAGEP made of some images."""
    return f"{change}-{subset}.png"


def _preface(rows: list[Row]) -> str:
    cpus = ", ".join(sorted({r["cpu"] for r in rows}))
    return (
        "Written by `python -m benchmarks accuracy` from `runs.csv`. Networks are made here, "
        f"models are small and trained for few steps on {cpus}: the paper's figures, of its own data sets and longer "
        "training, stand beside ours for orientation. Mean ± deviation over seeds."
    )


def _generalization(activation: str, rows: list[Row]) -> str:
    levels = sorted({int(r["augment"]) for r in rows})
    names = ["no augmentation" if i == 0 else f"U[1, 10^{i}]" for i in levels]
    head = f"## Generalisation of {activation} CNNs: Kendall's τ\n\n{_about(rows)}\n\n"
    lines = [_line("model", *(x for name in names for x in (name, "paper"))), _rule(1 + 2 * len(names))]
    for system in _systems(rows):
        cells = []
        for level in levels:
            found = [r for r in rows if r["model"] == system and int(r["augment"]) == level]
            cells += [_shown(found, 4), _paper(paper.GENERALIZATION.get((activation, level), {}), system)]
        lines.append(_line(system, *cells))
    return head + "\n".join(lines)


def _ablation(rows: list[Row]) -> list[str]:
    names = [name for name in dict.fromkeys(r["model"] for r in rows) if ":" in name]
    if not names:
        return []
    figures = paper.GENERALIZATION["relu", 0]
    lines = [_line("terms", "Kendall's τ", "paper"), _rule(3)]
    for name in names:
        found = [r for r in rows if r["model"] == name and r["augment"] == "0"]
        lines.append(_line(name.partition(": ")[2], _shown(found, 4), _paper(figures, name)))
    return ["### Ablation of the terms\n\n" + "\n".join(lines)]


def _classification(rows: list[Row]) -> str:
    figures = paper.CLASSIFICATION.get(paper.image_set(rows[0]["images"]), {})
    lines = [_line("model", "accuracy, %", "paper", "parameters"), _rule(4)]
    for system in _systems(rows):
        found = [r for r in rows if r["model"] == system]
        lines.append(_line(system, _shown(found, 2), _paper(figures, system), f"{int(found[0]['parameters']):,}"))
    return f"## Classification of {rows[0]['images']} SIRENs\n\n{_about(rows)}\n\n" + "\n".join(lines)


def _editing(rows: list[Row], change: str) -> str:
    lines = [_line("model", "MSE", "paper", "parameters"), _rule(4)]
    lines.append(_line("unedited", f"{float(rows[0]['baseline']):.5f}", "–", "–"))
    for system in _systems(rows):
        found = [r for r in rows if r["model"] == system]
        cells = _shown(found, 5), _paper(paper.EDITING[change], system), f"{int(found[0]['parameters']):,}"
        lines.append(_line(system, *cells))
    note = "Pixels are in [0, 1] here; the paper does not state its scale."
    return f"## Editing {rows[0]['images']} SIRENs: {change}\n\n{_about(rows)} {note}\n\n" + "\n".join(lines)


def _all_runs(rows: list[Row]) -> str:
    columns = ("task", "subset", "model", "augment", "seed", "test", "val", "steps", "learning_rate", "seconds")
    lines = [_line(*columns), _rule(len(columns))]
    lines += [_line(*(_number(r[c]) if c in ("test", "val") else r[c] for c in columns)) for r in rows]
    return "## Every run\n\n" + "\n".join(lines)


def _about(rows: list[Row]) -> str:
    r = rows[0]
    rates = sorted({float(row["learning_rate"]) for row in rows})
    rate = f"learning rate {rates[0]:g}" if len(rates) == 1 else f"learning rates {rates[0]:g} to {rates[-1]:g}"
    return (
        f"Networks of {r['images']} images: {r['train_networks']} for training, {r['test_networks']} for testing; "
        f"{r['steps']} steps of {r['batch_size']} for every model, {rate} with a cosine."
    )


def _draw_augmentation(path: Path, rows: list[Row]) -> None:
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6, 3.6))
    for system in _systems(rows):
        points = []
        for level in range(5):
            found = [float(r["test"]) for r in rows if r["model"] == system and r["augment"] == str(level)]
            if found:
                points.append((level, *mean_and_deviation(found)))
        if points:
            x, y, error = zip(*points, strict=True)
            ax.errorbar(x, y, error, marker="o", capsize=3, label=system)
    ax.set(xlabel="i: scales uniform in [1, 10^i], 0: none", ylabel="Kendall's τ, test", xticks=range(5))
    ax.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_bars(path: Path, rows: list[Row], label: str) -> None:
    import matplotlib.pyplot as plt

    systems = _systems(rows)
    figures = [mean_and_deviation([float(r["test"]) for r in rows if r["model"] == s]) for s in systems]
    figure, ax = plt.subplots(figsize=(6, 2.8))
    ax.bar(systems, [m for m, _ in figures], yerr=[d for _, d in figures], capsize=3)
    ax.set(ylabel=label)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _of(rows: list[Row], task: str, subset: str) -> list[Row]:
    return [r for r in rows if r["task"] == task and r["subset"] == subset]


def _systems(rows: list[Row]) -> list[str]:
    found = {r["model"] for r in rows if ":" not in r["model"]}
    return [name for name in ORDER if name in found] + sorted(found - set(ORDER))


def _shown(rows: list[Row], digits: int) -> str:
    if not rows:
        return "–"
    mean, deviation = mean_and_deviation([float(r["test"]) for r in rows])
    spread = f" ± {deviation:.{digits}f}" if len(rows) > 1 else " (1 seed)"
    return f"{mean:.{digits}f}{spread}"


def _paper(figures: paper.Figures, system: str) -> str:
    if system not in figures:
        return "–"
    mean, deviation = figures[system]
    return f"{mean:g}" if deviation is None else f"{mean:g} ± {deviation:g}"


def _number(text: str) -> str:
    return f"{float(text):.5g}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns
