"""What pages of reports are made of: their style, and tables of text and figures. Everything that is returned is HTML."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from typing import Any

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1f24; --faint: #5b6570; --rule: #d4d9df; --stripe: #f5f7f9; --grid: #e3e7eb;
  --series-0: #0969da; --series-1: #bc4c00; --series-2: #1a7f37; --series-3: #8250df; --series-4: #bf3989; --series-5: #7d6500; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181d; --ink: #e3e8ed; --faint: #98a3ae; --rule: #39424c; --stripe: #1b2127;
  --grid: #2b333b; --series-0: #58a6ff; --series-1: #f0883e; --series-2: #3fb950; --series-3: #bc8cff; --series-4: #f778ba;
  --series-5: #d4b106; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--ground); color: var(--ink);
  font: 0.95rem/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 0.6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0.3rem; }
p { margin: 0.4rem 0; max-width: 60rem; }
.faint { color: var(--faint); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.8rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.28rem 0.36rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--rule); white-space: nowrap; }
thead th { border-bottom: 2px solid var(--rule); vertical-align: bottom; }
th small { display: block; font-weight: normal; color: var(--faint); }
th.text, td.text { text-align: left; }
tbody tr:nth-child(even) { background: var(--stripe); }
table.facts th, table.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.facts th { font-weight: normal; color: var(--faint); white-space: nowrap; }
code { font: 0.85rem/1.4 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
figure { margin: 0.5rem 0; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 0 2rem; align-items: start; }
@media print {
  :root { --ground: #fff; --ink: #000; --faint: #333; --rule: #999; --stripe: #fff; --grid: #ddd;
    --series-0: #0550ae; --series-1: #953800; --series-2: #116329; --series-3: #6639ba; --series-4: #99286e; --series-5: #5c4a00; }
  @page { size: A4 landscape; margin: 12mm; }
  body { padding: 0; max-width: none; font-size: 9pt; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: 0.15rem 0.4rem; }
  h2, h3 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  thead { display: table-header-group; }
  .plots figure { max-height: 170mm; }
  .plots svg { max-height: 165mm; }
}
"""


def spread(values: Sequence[float | None]) -> str:
    """A figure; of several the median, and where they differ their range below it."""
    there = [value for value in values if value is not None]
    if not there:
        return "&ndash;"
    median = number(statistics.median(there))
    return median if min(there) == max(there) else f"{median}<br><small>{number(min(there))}&ndash;{number(max(there))}</small>"


def number(value: float) -> str:
    """Three digits or more, none of them invented."""
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def table(headings: Sequence[str | tuple[str, str]], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Cells are HTML already; the first ``words`` columns are words."""
    names = [heading if isinstance(heading, tuple) else (heading, "") for heading in headings]
    marks = [' class="text"' if place < words else "" for place in range(len(names))]
    head = "".join(
        f'<th scope="col"{mark}>{text(name)}{f"<small>{text(unit)}</small>" if unit else ""}</th>'
        for mark, (name, unit) in zip(marks, names, strict=True)
    )
    body = "".join("<tr>" + "".join(f"<td{mark}>{cell}</td>" for mark, cell in zip(marks, row, strict=True)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def fact_table(pairs: dict[str, Any]) -> str:
    """A line for each."""
    rows = "".join(f'<tr><th scope="row">{text(name)}</th><td>{text(shown(value))}</td></tr>' for name, value in pairs.items())
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def shown(value: Any) -> str:
    """A setting, for people."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {shown(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def text(words: str) -> str:
    """Whatever it is, as text."""
    return html.escape(words)
