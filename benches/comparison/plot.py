"""Bars as SVG: one panel for each metric, one bar for each variant. Readable on light and dark pages."""

import dataclasses
import html

from .report import short

COLUMN, GAP, MARGIN = 480, 24, 20
BAR, STEP, HEAD = 15, 22, 46
LABELS, VALUES = 162, 170

STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 13px }
  .main { font-weight: 600; font-size: 16px }
  .quiet { fill: #59636e; font-size: 11px }
  .own { font-weight: 600 }
  .page { fill: #ffffff }
  .bar { fill: #9aa7b4 }
  .bar.own { fill: #0b7a75 }
  .bar.raw { fill: none; stroke: #9aa7b4 }
  .cut { stroke: #ffffff; stroke-width: 4 }
  .spread { stroke: #24292f; stroke-width: 1; opacity: .55 }
  .axis { stroke: #d0d7de; stroke-width: 1 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .quiet { fill: #9198a1 }
    .page { fill: #0d1117 }
    .bar { fill: #5a6673 }
    .bar.own { fill: #2fb5ad }
    .bar.raw { stroke: #5a6673 }
    .cut { stroke: #0d1117 }
    .spread { stroke: #e6edf3 }
    .axis { stroke: #3d444d }
  }
"""


@dataclasses.dataclass(frozen=True)
class Bar:
    """One variant's figure. `kind` is how it looks: "own", "raw" (may be cut, so that the others stay visible) or ""."""

    label: str
    value: float
    spread: tuple
    note: str
    kind: str


class Panel:
    """One metric of some variants."""

    def __init__(self, title, more_is_better, bars):
        self.title, self.more_is_better, self.bars = title, more_is_better, bars

    def height(self):
        return HEAD + STEP * len(self.bars)

    def draw(self, left, top):
        most = max((bar.spread[1] for bar in self.bars if bar.kind != "raw"), default=0) or self.bars[0].spread[1] or 1
        parts = [text(left, top + 14, self.title, "title"),
                 text(left, top + 30, "more is better" if self.more_is_better else "less is better", "quiet")]
        axis = left + LABELS
        parts.append(f'<line class="axis" x1="{axis}" y1="{top + HEAD - 6}" x2="{axis}" y2="{top + self.height() - 2}"/>')
        for at, bar in enumerate(self.bars):
            parts += self.draw_bar(bar, most, axis, top + HEAD + STEP * at - 4)
        return parts

    @staticmethod
    def draw_bar(bar, most, axis, y):
        room = COLUMN - LABELS - VALUES
        mark = f" {bar.kind}" if bar.kind else ""
        width = min(max(room * bar.value / most, 1), room)
        parts = [text(axis - 8, y + 12, bar.label, f"label{mark}", "end"),
                 f'<rect class="bar{mark}" x="{axis}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>']
        ends = [min(axis + room * bound / most, axis + room) for bound in bar.spread]
        if ends[1] - ends[0] > 1:
            parts.append(f'<line class="spread" x1="{ends[0]:.1f}" y1="{y + BAR / 2}" x2="{ends[1]:.1f}" y2="{y + BAR / 2}"/>')
        if bar.value > most:
            # Cut: the bar goes on, but not to scale.
            cut = axis + room - 14
            parts.append(f'<path class="cut" d="M{cut} {y + BAR + 1} l5 -{BAR + 2}"/>')
        note = f"  ({bar.note})" if bar.note else ""
        return parts + [text(max(axis + width, ends[1]) + 6, y + 12, f"{short(bar.value)}{note}", mark.strip())]


def page(title, origin, panels, columns=2):
    """A whole file: panels in rows, where and when below."""
    panels = [panel for panel in panels if panel.bars]
    rows = [panels[at:at + columns] for at in range(0, len(panels), columns)]
    width = MARGIN * 2 + COLUMN * columns + GAP * (columns - 1)
    parts, top = [text(MARGIN, MARGIN + 12, title, "main")], MARGIN + 34
    for row in rows:
        for at, panel in enumerate(row):
            parts += panel.draw(MARGIN + at * (COLUMN + GAP), top)
        top += max(panel.height() for panel in row) + GAP - 6
    for line in origin:
        parts.append(text(MARGIN, top + 4, line, "quiet"))
        top += 16
    height = top + MARGIN - 8
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" aria-label="{html.escape(title)}">\n<style>{STYLE}</style>\n'
            f'<rect class="page" width="{width}" height="{height}" rx="6"/>\n' + "\n".join(parts) + "\n</svg>\n")


def text(x, y, words, kind, anchor="start"):
    anchor = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{anchor}>{html.escape(words)}</text>'
