"""Many runs in one table: what each fault did, over all of its rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvconnect.testing.cluster.recovery import Trace
from kvconnect.testing.cluster.report import Report

_HEADS = ("scenario", "hosts", "load", "fault", "times", "calls hit", "seen after", "well after",
          "pages gone", "held")  # fmt: skip


def table(reports: Iterable[Report]) -> str:
    """Return a Markdown table, a row for each fault of each run.

    "calls hit" failed, or were slow where that is what the fault does. "seen after" are seconds
    from a fault to the first of them, "well after" to the first good call of the worker that took
    longest; all are least to most over the rounds, the times over those that hit somebody.
    """
    lines = [_line(_HEADS), _line(["---"] * len(_HEADS))]
    for report in reports:
        lines += [_line(cells) for cells in _rows(report)]
    return "\n".join(lines)


def _rows(report: Report) -> list[list[str]]:
    run = [report.scenario.name, str(report.hosts), f"{report.seconds:g} s"]
    gone = [missing for _, missing, _ in report.verified.values()]
    there = sum(found for found, _, _ in report.verified.values()) + sum(gone)
    end = [f"{sum(gone)} of {there}" if there else "-", "yes" if report.passed else "NO"]
    by_words: dict[str, list[Trace]] = {}
    for trace in report.traces:
        by_words.setdefault(trace.words, []).append(trace)
    rows = [[*run, words, *_figures(traces), *end] for words, traces in by_words.items()]
    return rows or [[*run, "none", "0", str(sum(one.bad for one in report.latencies)), "-", "-",
                     *end]]  # fmt: skip


def _figures(traces: Sequence[Trace]) -> list[str]:
    hit = [trace for trace in traces if trace.hit]
    return [
        str(len(traces)),
        _span([float(trace.bad) for trace in traces], 0),
        _span([trace.detect for trace in hit], 1),
        _span([trace.outage for trace in hit], 1),
    ]


def _span(values: Iterable[float | None], digits: int) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    least, most = f"{known[0]:.{digits}f}", f"{known[-1]:.{digits}f}"
    unit = " s" if digits else ""
    return f"{least}{unit}" if least == most else f"{least}-{most}{unit}"


def _line(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"
