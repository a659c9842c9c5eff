"""Pictures of a dry run: memory by class as bars, the time line of one step, collectives by axis."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jaxpar.dryrun.report import Report

STREAMS = ("compute", "communication", "host")
_COLOURS = {"compute": "#4477aa", "communication": "#ee6677", "host": "#ccbb44"}


def plot_memory(report: Report, axes: Axes) -> None:
    """One bar per class, with the usable memory as a line in the title."""
    names = list(report.bytes_by_class)
    sizes = [report.bytes_by_class[name] / 2**30 for name in names]
    axes.barh(names, sizes, color="#4477aa")
    axes.invert_yaxis()
    verdict = "fits" if report.fits else "does not fit"
    axes.set_title(f"peak {report.peak_bytes / 2**30:.1f} of {report.usable_bytes / 2**30:.1f} GiB usable: {verdict}")
    axes.set_xlabel("GiB per GPU")


def plot_timeline(report: Report, axes: Axes) -> None:
    """Streams of one step; a gap in compute is exposed communication. Not compiled: compute, exposed, bubble."""
    if report.spans:
        streams = [stream for stream in STREAMS if any(span.stream == stream for span in report.spans)]
        for row, stream in enumerate(streams):
            bars = [
                (span.start_s * 1e3, (span.end_s - span.start_s) * 1e3)
                for span in report.spans
                if span.stream == stream
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLOURS[stream])
        axes.set_yticks(range(len(streams)), streams)
        axes.invert_yaxis()
    else:
        parts = [("compute", report.compute_s), ("exposed communication", report.exposed_s)]
        parts.append(("bubble", report.bubble_fraction * report.step_time_s))
        left = 0.0
        for name, seconds in parts:
            axes.barh(["step"], [seconds * 1e3], left=left, label=name)
            left += seconds * 1e3
        axes.legend(fontsize=7)
    axes.set_xlabel("ms (estimate)")
    axes.set_title(f"one step: {report.step_time_s * 1e3:.1f} ms, MFU {report.mfu:.0%}")


def plot_collectives(report: Report, axes: Axes) -> None:
    """Hidden and exposed time of each kind of collective."""
    rows = report.collectives[:8]
    labels = [f"{row.kind} {row.dtype}\n{row.axis}" for row in rows]
    exposed = [row.exposed_s * 1e3 for row in rows]
    hidden = [max(0.0, row.time_s - row.exposed_s) * 1e3 for row in rows]
    axes.barh(labels, hidden, color="#aaccee", label="hidden")
    axes.barh(labels, exposed, left=hidden, color="#ee6677", label="exposed")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("ms (estimate)")
    axes.set_title("communication")
    axes.legend(fontsize=7)


def plot_report(report: Report) -> Any:
    """A figure with memory, time line and communication."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    grid = figure.add_gridspec(2, 2)
    plot_memory(report, figure.add_subplot(grid[0, 0]))
    plot_collectives(report, figure.add_subplot(grid[0, 1]))
    plot_timeline(report, figure.add_subplot(grid[1, :]))
    return figure


def save_plot(report: Report, path: str | Path) -> None:
    """Writes the figure; the ending of the name chooses the format."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    plot_report(report).savefig(path, dpi=120)
