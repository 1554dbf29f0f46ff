"""The funnel as a picture."""

from __future__ import annotations

from pathlib import Path

from afm.distill.filters.funnel import Funnel
from afm.errors import MissingExtraError
from afm.runs.atomic import replacing

_KEPT, _DROPPED = "#2a6f97", "#e0e4e8"


def draw_funnel(funnel: Funnel, path: Path, title: str) -> None:
    """Write a PNG with a bar a stage: what it left, and in grey what it dropped.

    Raises:
        MissingExtraError: ``matplotlib`` is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "filters") from error
    stages = list(funnel.stages())
    names = ["read", *(stage.name.replace("_", " ") for stage in stages)]
    left = [funnel.seen, *(stage.left for stage in stages)]
    lost = [0, *(stage.dropped for stage in stages)]
    if funnel.copies:
        names.append("with copies")
        left.append(funnel.kept + funnel.copies)
        lost.append(0)
    figure = Figure(figsize=(8, 1.2 + 0.38 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(names))
    axes.barh(places, left, color=_KEPT)
    axes.barh(places, lost, left=left, color=_DROPPED)
    for place, kept, gone in zip(places, left, lost, strict=True):
        axes.text(
            kept + gone, place, f" {kept:,}" + (f"  (-{gone:,})" if gone else ""), va="center", fontsize=9
        )
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(*left, 1) * 1.25)
    axes.set_xlabel("trajectories")
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
