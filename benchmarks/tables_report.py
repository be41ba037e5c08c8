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
        "Speed-up is over MAGEP-reference. Step MB: the peak of torch's allocator in a step, which does not see what "
        "kernels keep between steps; process MB: the peak of a process that trains this model alone. Columns named "
        "after the paper are its own figures, on an A100."
    )


def describe(title: str, rows: list[Row], where: dict[str, str]) -> Table:
    """One table for the console."""
    table = Table(title=title, caption=caption(rows, where))
    for column in COLUMNS:
        is_name = column == "model"
        table.add_column(column, justify="left" if is_name else "right", min_width=15 if is_name else None)
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


OTHERS, PAPERS, FASTEST = "tab:blue", "lightgray", "tab:orange"


def draw(folder: Path, titles: dict[str, str], rows: list[Row]) -> list[Path]:
    """runtime.png and memory.png, bars on log axes, and scatter.png, one against the other; the tables side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables: dict[str, list[Row]] = {}
    for row in rows:
        if number(row["p50_ms"]) is not None:
            tables.setdefault(str(row["table"]), []).append(row)
    if not tables:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    longest = max(map(len, tables.values()))
    size = (5.5 * len(tables), 1.6 + 0.42 * longest)
    paths = []
    for name, ours, papers, label, form in (
        ("runtime", "run_s", "paper_a100_run_s", "whole run, seconds (gray: the paper's, on an A100)", duration),
        ("memory", "process_mb", "paper_a100_mb", "peak of the process, MB (gray: the paper's, on an A100)", whole),
    ):
        figure, grid = pyplot.subplots(1, len(tables), figsize=size, squeeze=False)
        for axes, (table, chosen) in zip(grid[0], tables.items(), strict=True):
            for column, shift in ((ours, -0.2), (papers, 0.2)):
                for k, row in enumerate(chosen):
                    x = number(row[column])
                    if x is None:
                        continue
                    colour = PAPERS if column == papers else FASTEST if row is fastest(chosen) else OTHERS
                    axes.barh(k + shift, x, height=0.38, color=colour)
                    axes.annotate(
                        form(x), (x, k + shift), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7
                    )
            axes.set(xscale="log", xlabel=label, title=titles[table].partition(":")[0])
            low, high = axes.get_xlim()
            axes.set_xlim(low / 3, high * 3)
            axes.set_ylim(longest - 0.4, -0.6)
            axes.set_yticks(range(len(chosen)), [str(row["model"]) for row in chosen])
            axes.grid(axis="x", alpha=0.3)
        paths.append(folder / f"{name}.png")
        figure.tight_layout()
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    figure, grid = pyplot.subplots(1, len(tables), figsize=(size[0], 4.8), squeeze=False)
    for axes, (table, chosen) in zip(grid[0], tables.items(), strict=True):
        for row in chosen:
            x, y = number(row["p50_ms"]), number(row["peak_mb"])
            axes.scatter(x, y, color=FASTEST if row is fastest(chosen) else OTHERS)
            axes.annotate(str(row["model"]), (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
        axes.set(
            xscale="log", yscale="log", xlabel="ms per training step", ylabel="peak MB of torch's allocator in a step"
        )
        axes.set_title(titles[table].partition(":")[0])
        axes.margins(0.3)
        axes.grid(alpha=0.3)
    paths.append(folder / "scatter.png")
    figure.tight_layout()
    figure.savefig(paths[-1], dpi=110)
    pyplot.close(figure)
    return paths


def whole(x: float | None) -> str:
    return "–" if x is None else f"{x:.0f}"


def fastest(rows: list[Row]) -> Row:
    return min(rows, key=lambda row: number(row["p50_ms"]) or 0)
