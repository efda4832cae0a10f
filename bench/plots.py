"""PNG plots of a benchmark's results."""

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"ours": "#1f77b4", "mlx-lm": "#7f7f7f", "mlx-vlm": "#d62728"}


def colour(name: str) -> str:
    return next(c for prefix, c in COLOURS.items() if name.startswith(prefix))


def draw(results: dict, summary: dict, directory: Path) -> None:
    """speed.png: tokens per second by engine and workload.  acceptance.png: by position."""
    directory.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, len(summary), figsize=(4.6 * len(summary), 4.2), sharex=True, squeeze=False)
    for axis, (kind, lines) in zip(axes[0], summary.items()):
        names = [line["engine"] for line in lines][::-1]
        speeds = [1000 / line["ms_per_token"] for line in lines][::-1]
        bars = axis.barh(names, speeds, color=[colour(n) for n in names])
        axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
        axis.set_title(kind)
        axis.set_xlabel("tokens per second")
        axis.margins(x=0.15)
        axis.tick_params(axis="y", labelsize=8)
    figure.tight_layout()
    figure.savefig(directory / "speed.png", dpi=120)
    plt.close(figure)

    longest = max((n for n in results if n.startswith("ours K=")), key=lambda n: int(n.split("=")[1]), default=None)
    if longest is None:
        return
    figure, axis = plt.subplots(figsize=(5.2, 3.6))
    for kind, runs in results[longest].items():
        drafts = max(len(r.accepted_by_position) for r in runs)
        shares = [statistics.mean(r.accepted_by_position[i] / r.rounds for r in runs) for i in range(drafts)]
        axis.plot(range(1, drafts + 1), [100 * s for s in shares], marker="o", label=kind)
    axis.set(xlabel="draft position", ylabel="rounds in which it was accepted, %", ylim=(0, 100))
    axis.legend()
    figure.tight_layout()
    figure.savefig(directory / "acceptance.png", dpi=120)
    plt.close(figure)
