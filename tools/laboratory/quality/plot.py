"""The picture of the result: accuracy by distance, by place, and while it is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = {"zero_init": "tab:red", "zero3_from_pretrained": "tab:blue", "to_bf16": "tab:orange"}


def draw(found: dict[str, Any], titles: dict[str, str], file: Path) -> None:
    """Draw ``found`` into ``file``; its suffix says in which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (distance, position, curve) = pyplot.subplots(1, 3, figsize=(13, 4.2), sharey=True)
    for path, kinds in found["loaded"].items():
        for axes, key in ((distance, "by_distance"), (position, "by_place")):
            stock, guarded = (kinds[kind][key] for kind in ("stock", "guarded"))
            axes.plot(
                [int(x) for x in stock], list(stock.values()), "o-", color=COLORS[path], label=titles[path]
            )
            label = "all three, guarded" if path == list(found["loaded"])[-1] else None
            axes.plot([int(x) for x in guarded], list(guarded.values()), "k--", lw=1.2, label=label)
    distance.set(xscale="log", xlabel="distance asked for (positions)", ylabel="accuracy")
    distance.set_title("the checkpoint, loaded: by distance", fontsize=10)
    distance.legend(fontsize=8, loc="lower left")
    position.set(xlabel="place of the question in the sequence")
    position.set_title("the checkpoint, loaded: by place", fontsize=10)
    runs = {"right tables": (found["base"], "black")}
    runs |= {titles[path]: (result, COLORS[path]) for path, result in found["trained"].items()}
    for label, (result, color) in runs.items():
        steps, accuracy = zip(*result["curve"], strict=True)
        curve.plot(steps, accuracy, color=color, label=label, lw=1)
    curve.set(xlabel="step of training (2,048 tokens each)")
    curve.set_title("trained with the damaged tables", fontsize=10)
    curve.legend(fontsize=8, loc="lower right")
    for axes in (distance, position, curve):
        axes.set_ylim(-0.03, 1.05)
        axes.axhline(1 / 32, color="gray", lw=0.7, ls=":")
        axes.grid(alpha=0.25)
    figure.suptitle(", ".join(f"{name} {version}" for name, version in found["versions"].items()), fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    pyplot.close(figure)
