"""PNG plots of what the bench measured."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"ours alone": "#9ecae1", "ours, every": "#9ecae1", "ours": "#1f77b4", "mlx-lm": "#7f7f7f", "mlx-vlm": "#d62728"}
STYLES = ("-", "--", ":", "-.")


def colour(name: str) -> str:
    return next(c for prefix, c in COLOURS.items() if name.startswith(prefix))


def draw(report: dict, directory: Path) -> None:
    """A file per part that the report has: speed, acceptance, round, context, batch.

    report: as `python -m bench` prints it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("speed", "acceptance", "round", "context", "batch"):
        figure = globals()[f"draw_{name}"](report)
        if figure is not None:
            figure.tight_layout()
            figure.savefig(directory / f"{name}.png", dpi=120)
            plt.close(figure)


def draw_speed(report: dict):
    """Tokens per second by engine, a panel per workload."""
    if not (workloads := report.get("workloads")):
        return None
    engines = len(next(iter(workloads.values())))
    figure, axes = plt.subplots(
        1, len(workloads), figsize=(4.6 * len(workloads), 1 + 0.28 * engines), sharex=True, squeeze=False
    )
    for axis, (kind, lines) in zip(axes[0], workloads.items()):
        names = [line["engine"] for line in lines][::-1]
        bars = axis.barh(names, [1000 / line["ms_per_token"] for line in lines][::-1], color=[colour(n) for n in names])
        axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
        axis.set(title=kind, xlabel="tokens per second")
        axis.margins(x=0.15)
        axis.tick_params(axis="y", labelsize=8)
    return figure


def draw_acceptance(report: dict):
    """Share of rounds in which each draft token was accepted, at our largest fixed draft length."""
    longest = {
        kind: max(lines, key=lambda line: len(line["accepted_by_position"]) if line["engine"].startswith("ours K=") else -1)
        for kind, lines in report.get("workloads", {}).items()
    }
    if not any(line["accepted_by_position"] for line in longest.values()):
        return None
    figure, axis = plt.subplots(figsize=(5.2, 3.6))
    for kind, line in longest.items():
        shares = line["accepted_by_position"]
        axis.plot(range(1, len(shares) + 1), [100 * s for s in shares], marker="o", label=kind)
    axis.set(xlabel="draft position", ylabel="rounds in which it was accepted, %", ylim=(0, 100))
    axis.legend()
    return figure


def draw_round(report: dict):
    """What a round's two halves take, by draft length."""
    if not (split := report.get("round")):
        return None
    names, halves = [str(k) for k in split], list(split.values())
    verify, drafting = ([half[name] for half in halves] for name in ("verify_ms", "draft_ms"))
    figure, axis = plt.subplots(figsize=(5.2, 3.6))
    axis.bar(names, verify, color="#1f77b4", label="verify")
    axis.bar(names, drafting, bottom=verify, color="#ff7f0e", label="draft")
    axis.set(xlabel="draft length K", ylabel="milliseconds of a round")
    axis.legend()
    return figure


def draw_context(report: dict):
    """Time to the first token and of a round, against context length."""
    if not (lines := report.get("context")):
        return None
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.6))
    for axis, name, label in zip(axes, ("first_token_seconds", "round_ms"), ("seconds to the first token", "ms of a round")):
        for index, engine in enumerate(dict.fromkeys(line["engine"] for line in lines)):
            points = [(line["context"], line[name]) for line in lines if line["engine"] == engine and name in line]
            if points:
                axis.plot(*zip(*points), STYLES[index % 4], marker="o", color=colour(engine), label=engine)
        axis.set(xlabel="tokens of context", ylabel=label, xscale="log")
        axis.legend(fontsize=8)
    axes[0].set_yscale("log")
    axes[1].set_ylim(0, None)
    return figure


def draw_batch(report: dict):
    """Tokens per second of all rows together, against the number of rows; prompts left out."""
    if not (batch := report.get("batch")):
        return None
    figure, axis = plt.subplots(figsize=(7.2, 3.8))
    styles = {}
    for engine in dict.fromkeys(line["engine"] for line in batch["lines"]):
        style = styles.setdefault(engine.split()[-1], STYLES[len(styles) % 4])  # one per draft length
        points = [(line["rows"], line["decode_tokens_per_second"]) for line in batch["lines"] if line["engine"] == engine]
        axis.plot(*zip(*points), style, marker="o", color=colour(engine), label=engine)
    rows = sorted({line["rows"] for line in batch["lines"]})
    axis.set(xlabel="rows", ylabel="tokens per second, all rows", ylim=(0, None), xticks=rows)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
