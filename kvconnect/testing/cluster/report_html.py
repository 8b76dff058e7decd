"""The report of a run as one page that needs nothing else: charts, tables, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from html import escape
from typing import TYPE_CHECKING

import msgspec

from kvconnect.testing.cluster.figures import Slice
from kvconnect.testing.cluster.invariants import INVARIANTS, Finding
from kvconnect.testing.cluster.picture import Axis, Band, Points, fault_chart, line_chart

if TYPE_CHECKING:
    from kvconnect.testing.cluster.report import Report

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6470; --rule: #d9dee4;
  --ground: #fff; --bad: #c4321f; --ok: #1a7f45; --band: #f3c9a866; --fault: #d9762b;
  --c0: #1f6feb; --c1: #c2410c; --c2: #15803d; --c3: #7e22ce; --c4: #0e7490; --c5: #a16207; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa4b0; --rule: #333a44;
  --ground: #14171c; --bad: #ff7b6b; --ok: #5ad18c; --band: #8a4b1d55; --fault: #e0893f;
  --c0: #6ea8ff; --c1: #ff9a6b; --c2: #5ad18c; --c3: #c79bff; --c4: #5cc8dd; --c5: #e2b93b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); } .bad { color: var(--bad); font-weight: 600; }
.ok { color: var(--ok); font-weight: 600; } .wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; } code { font-size: .85em; }
.grid { stroke: var(--rule); stroke-width: 1; } .tick, .name { fill: var(--soft); font-size: 11px; }
.name { fill: var(--ink); } .band { fill: var(--band); } .fault { fill: var(--fault); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.legend { display: flex; gap: 1.2rem; flex-wrap: wrap; font-size: .85rem; }
.legend i { display: inline-block; width: 1.1em; height: 3px; margin-right: .4em;
  vertical-align: middle; }
""" + "".join(
    f"path.c{n} {{ stroke: var(--c{n}); }} i.c{n} {{ background: var(--c{n}); }}\n"
    for n in range(6)
)


def page(report: Report) -> str:
    """Return the whole page."""
    name, about = escape(report.scenario.name), escape(report.scenario.about)
    verdict = (
        '<span class="ok">all invariants held</span>'
        if report.passed
        else f'<span class="bad">{len(report.findings)} findings</span>'
    )
    body = [
        f"<h1>{name}</h1><p>{about}</p><p>{verdict}</p>",
        f'<p class="soft">{escape(_how(report))}</p>',
        _findings(report.findings),
        _charts(report),
        _faults(report),
        _invariants(report),
        _latencies(report),
        _verified(report),
        _members(report),
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _how(report: Report) -> str:
    run = f"seed {report.seed}, {report.seconds:g} s, {report.hosts} hosts"
    return f"{run}; {report.machine}; {report.written}"


def _charts(report: Report) -> str:
    end = max([report.seconds, *(s.at + s.seconds for s in report.slices)])
    axis = Axis(end)
    bands = [
        Band(one.applied, one.lifted if one.lifted is not None else end, one.words)
        for one in report.traces
    ]
    ops = sorted({op for s in report.slices for op in s.p50})
    hosts = sorted({host for s in report.slices for host in s.nbytes})
    latency: dict[str, Points] = {}
    for op in ops:
        latency[f"{op} p50"] = [(_mid(s), _ms(s.p50.get(op))) for s in report.slices]
        latency[f"{op} p99"] = [(_mid(s), _ms(s.p99.get(op))) for s in report.slices]
    rates: dict[str, Points] = {
        host: [(_mid(s), s.nbytes.get(host, 0) / s.seconds / 1e6) for s in report.slices]
        for host in hosts
    }
    hit: dict[str, Points] = {
        "pages got of those asked for": [
            (_mid(s), None if s.hit_rate is None else 100 * s.hit_rate) for s in report.slices
        ]
    }
    return "".join(
        (
            _section("Faults", fault_chart(axis, bands)) if bands else "",
            _section("Hit rate", line_chart(axis, hit, bands, unit=" %", top=104)),
            _section("Latency", line_chart(axis, latency, bands, unit=" ms", log=True)),
            _section("Moved by each host", line_chart(axis, rates, bands, unit=" MB/s")),
        )
    )


def _mid(part: Slice) -> float:
    return part.at + part.seconds / 2


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    rows = (
        (
            f'<span class="bad">{escape(one.invariant)}</span>',
            f"{one.at:.2f}",
            escape(one.words)
            + (f"<br><code>{escape(_json(one.entry))}</code>" if one.entry is not None else ""),
        )
        for one in findings
    )
    return _section("What did not hold", _table(("invariant", "at, s", "what"), rows, numbers={1}))


def _json(entry: object) -> str:
    text = msgspec.json.encode(entry).decode()
    return text if len(text) <= 600 else f"{text[:600]} …"


def _faults(report: Report) -> str:
    rows = (
        (
            escape(one.words),
            f"{one.applied:.1f}",
            _seconds(None if one.lifted is None else one.lifted - one.applied),
            "yes" if one.shown else '<span class="bad">no</span>',
            str(one.bad),
            _seconds(one.detect),
            _seconds(one.recover),
            _seconds(one.outage),
            escape(", ".join(one.hit)),
        )
        for one in report.traces
    )
    heads = (
        "fault", "at, s", "lasted, s", "seen", "calls hit", "detected after, s",
        "well after lifting, s", "well after fault, s", "hit",
    )  # fmt: skip
    return _section("What each fault did", _table(heads, rows, numbers={1, 2, 4, 5, 6, 7}))


def _invariants(report: Report) -> str:
    rows = (
        (
            escape(name),
            escape(INVARIANTS[name][0]) if name in INVARIANTS else "",
            '<span class="ok">held</span>' if held else '<span class="bad">did not hold</span>',
        )
        for name, held in report.invariants.items()
    )
    return _section("Invariants", _table(("name", "what it says", ""), rows))


def _latencies(report: Report) -> str:
    rows = (
        (
            *(one.op, str(one.calls), str(one.bad)),
            *(f"{v * 1e3:.1f}" for v in (one.p50, one.p90, one.p99, one.most)),
        )
        for one in report.latencies
    )
    heads = ("operation", "calls", "bad", "p50, ms", "p90, ms", "p99, ms", "most, ms")
    return _section("Latency of calls", _table(heads, rows, numbers=set(range(1, 7))))


def _verified(report: Report) -> str:
    if not report.verified:
        return ""
    rows = ((escape(g), *(str(n) for n in counts)) for g, counts in report.verified.items())
    heads = ("group", "there", "missing", "wrong")
    title = "Acknowledged pages, looked at by a fresh reader at the end"
    return _section(title, _table(heads, rows, numbers={1, 2, 3}))


def _members(report: Report) -> str:
    rows = (
        (
            escape(one.name),
            f"host{one.host}",
            escape(", ".join(one.roles)),
            escape(one.store or one.transport),
            f"{one.deadline:g} + {one.grace:g}",
        )
        for one in report.members
    )
    heads = ("worker", "host", "roles", "store or transport", "deadline and grace, s")
    return _section("Workers", _table(heads, rows))


def _section(title: str, body: str) -> str:
    return f'<h2>{escape(title)}</h2><div class="wide">{body}</div>'


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: AbstractSet[int] = frozenset()
) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="n"' if at in numbers else "" for at in range(len(cells))]
        inside = [f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)]
        return f"<tr>{''.join(inside)}</tr>"

    return f"<table>{row(heads, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
