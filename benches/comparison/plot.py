"""Bars as SVG: one panel for each metric, one bar for each variant. Readable on light and dark pages."""

import html

from .report import short

COLUMN, GAP, MARGIN = 410, 24, 20
BAR, STEP, HEAD = 15, 22, 46
LABELS, VALUES = 162, 88

STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 13px }
  .main { font-weight: 600; font-size: 16px }
  .quiet { fill: #59636e; font-size: 11px }
  .own { font-weight: 600 }
  .page { fill: #ffffff }
  .bar { fill: #9aa7b4 }
  .bar.own { fill: #0b7a75 }
  .spread { stroke: #24292f; stroke-width: 1; opacity: .55 }
  .axis { stroke: #d0d7de; stroke-width: 1 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .quiet { fill: #9198a1 }
    .page { fill: #0d1117 }
    .bar { fill: #5a6673 }
    .bar.own { fill: #2fb5ad }
    .spread { stroke: #e6edf3 }
    .axis { stroke: #3d444d }
  }
"""


class Panel:
    """One metric of some variants: `bars` are (label, value, least, most, is_own)."""

    def __init__(self, title, more_is_better, bars):
        self.title, self.more_is_better, self.bars = title, more_is_better, bars

    def height(self):
        return HEAD + STEP * len(self.bars)

    def draw(self, left, top):
        most = max(most for _, _, _, most, _ in self.bars) or 1
        room = COLUMN - LABELS - VALUES
        own = next((value for _, value, _, _, is_own in self.bars if is_own), None)
        parts = [text(left, top + 14, self.title, "title"),
                 text(left, top + 30, "more is better" if self.more_is_better else "less is better", "quiet")]
        axis = left + LABELS
        parts.append(f'<line class="axis" x1="{axis}" y1="{top + HEAD - 6}" x2="{axis}" y2="{top + self.height() - 2}"/>')
        for at, (label, value, least, most_of_it, is_own) in enumerate(self.bars):
            y = top + HEAD + STEP * at - 4
            mark = " own" if is_own else ""
            width = max(room * value / most, 1)
            parts.append(text(axis - 8, y + 12, label, f"label{mark}", "end"))
            parts.append(f'<rect class="bar{mark}" x="{axis}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>')
            ends = [axis + room * bound / most for bound in (least, most_of_it)]
            if ends[1] - ends[0] > 1:
                parts.append(f'<line class="spread" x1="{ends[0]:.1f}" y1="{y + BAR / 2}" x2="{ends[1]:.1f}" y2="{y + BAR / 2}"/>')
            times = f"  ({ratio(own, value)})" if own and value and not is_own else ""
            parts.append(text(max(axis + width, ends[1]) + 6, y + 12, f"{short(value)}{times}", mark.strip()))
        return parts


def ratio(own, value):
    """Ours times or divided by how much gives this figure."""
    times = value / own
    sign, times = ("×", times) if times >= 1 else ("÷", 1 / times)
    return f"{sign}{times:.1f}" if times < 20 else f"{sign}{times:.0f}"


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
