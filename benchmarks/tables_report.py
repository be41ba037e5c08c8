"""The efficiency tables on screen, in Markdown and as plots."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

Row = dict[str, object]

COLUMNS = (
    "model",
    "step ms",
    "p20–p80",
    "whole run",
    "speed-up",
    "step MB",
    "process MB",
    "params",
    "ops",
    "paper's run, A100",
    "paper's MB, A100",
    "paper's params",
)


def number(value: object) -> float | None:
    """A cell of the CSV as a number, if it is one."""
    try:
        return float(str(value))
    except ValueError:
        return None


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def show(value: object, form: str = "{:.1f}") -> str:
    """A cell for reading: a number in this form, a text as it is, a dash for nothing."""
    x = number(value)
    return form.format(x) if x is not None else (str(value) or "–")


def millions(value: object) -> str:
    x = number(value)
    return "–" if x is None else f"{x / 1e6:.2f}M"


def cells(row: Row) -> list[str]:
    """A row in the order of COLUMNS. A failed row has its reason in place of the step time."""
    paper = [
        duration(number(row["paper_a100_run_s"])),
        show(row["paper_a100_mb"], "{:.0f}"),
        millions(row["paper_parameters"]),
    ]
    if number(row["p50_ms"]) is None:
        return [str(row["model"]), str(row["status"]), *["–"] * 7, *paper]
    name = str(row["model"]) if row["status"] == "ok" else f"{row['model']} ({row['status']})"
    return [
        name,
        show(row["p50_ms"], "{:.2f}"),
        f"{show(row['p20_ms'], '{:.2f}')}–{show(row['p80_ms'], '{:.2f}')}",
        duration(number(row["run_s"])),
        show(row["speed_up"], "{:.2f}×"),
        show(row["peak_mb"]),
        show(row["process_mb"], "{:.0f}"),
        millions(row["parameters"]),
        show(row["ops"], "{:.0f}"),
        *paper,
    ]


def caption(rows: list[Row], where: dict[str, str]) -> str:
    first = rows[0]
    kind = "measured" if first["mode"] == "full" else "projected from the median step"
    return (
        f"float32 on {first['device']} ({where['cpu']}, {where['threads']} threads), torch {where['torch']}; "
        f"networks: {first['inputs']}; whole run {kind}: {first['steps']} steps of batch {first['batch']}. "
        "Speed-up is over MAGEP-reference. Step MB: the peak of torch's allocator in a step; process MB: the peak of a "
        "process that trains this model alone. Columns named after the paper are its own figures, on an A100."
    )


def describe(title: str, rows: list[Row], where: dict[str, str]) -> Table:
    """One table for the console."""
    table = Table(title=title, caption=caption(rows, where))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=column == "model")
    for row in rows:
        table.add_row(*cells(row))
    return table


def write_markdown(path: Path, titles: dict[str, str], rows: list[Row], where: dict[str, str]) -> None:
    """All tables of a run."""
    lines = []
    for table in dict.fromkeys(str(row["table"]) for row in rows):
        chosen = [row for row in rows if row["table"] == table]
        lines += [f"## {titles[table]}", "", caption(chosen, where), ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in cells(row))} |" for row in chosen]
        lines.append("")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def draw(folder: Path, titles: dict[str, str], rows: list[Row]) -> list[Path]:
    """runtime.png and memory.png, bars on log axes, and scatter.png, one against the other; the tables side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if number(row["p50_ms"]) is not None]
    tables = list(dict.fromkeys(str(row["table"]) for row in rows))
    if not tables:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    bars = {
        "runtime": (("run_s", "this machine"), ("paper_a100_run_s", "paper, A100"), "seconds for the whole run"),
        "memory": (("process_mb", "this machine, process"), ("paper_a100_mb", "paper, A100"), "peak MB"),
    }
    paths = []
    for name, (ours, paper, label) in bars.items():
        figure, grid = pyplot.subplots(1, len(tables), figsize=(5.5 * len(tables), 4.8), squeeze=False)
        for axes, table in zip(grid[0], tables, strict=True):
            chosen = [row for row in rows if row["table"] == table]
            for shift, (column, legend) in zip((0.2, -0.2), (ours, paper), strict=True):
                points = [(k + shift, number(row[column])) for k, row in enumerate(chosen)]
                kept = [(y, x) for y, x in points if x is not None]
                if kept:
                    axes.barh([y for y, _ in kept], [x for _, x in kept], height=0.38, label=legend)
            axes.set(xscale="log", xlabel=label, title=titles[table].partition(":")[0])
            axes.set_yticks(range(len(chosen)), [str(row["model"]) for row in chosen])
            axes.invert_yaxis()
            axes.grid(axis="x", alpha=0.3)
            axes.legend(loc="lower right", fontsize=8)
        figure.tight_layout()
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    figure, grid = pyplot.subplots(1, len(tables), figsize=(5.5 * len(tables), 4.8), squeeze=False)
    for axes, table in zip(grid[0], tables, strict=True):
        for row in (row for row in rows if row["table"] == table):
            x, y = number(row["p50_ms"]), number(row["peak_mb"])
            if x is None or y is None:
                continue
            axes.scatter(x, y)
            axes.annotate(str(row["model"]), (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
        axes.set(xscale="log", yscale="log", xlabel="ms per training step", ylabel="peak MB of a step")
        axes.set_title(titles[table].partition(":")[0])
        axes.margins(0.2)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    paths.append(folder / "scatter.png")
    figure.savefig(paths[-1], dpi=110)
    pyplot.close(figure)
    return paths
