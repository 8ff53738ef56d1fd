"""Which metrics become which plot."""

from .measure import METRICS
from .plot import Bar, Panel, page
from .report import compared

# Scenario and metric of each panel; the first plot is the README's.
PLOTS = {
    "overview": ("What the overlay costs", [
        ("gso", "tcp1_gbps", "TCP, 1 stream, Gbit/s"),
        ("gso", "tcp1_cpu", "CPU seconds of both daemons per GB"),
        ("wire", "tcp1_gbps", "TCP, 1 stream, link of single packets, Gbit/s"),
        ("gso", "udp64_kpps", "UDP, 64 bytes, kpps"),
        ("gso", "pingload_p50", "ping beside a TCP stream, median, µs"),
        ("gso", "peak_rss", "peak memory of a daemon (RSS), MB"),
    ]),
    "links": ("TCP, 1 stream, Gbit/s", [
        ("gso", "tcp1_gbps", "link of super-packets, AES (WireGuard: ChaCha20)"),
        ("wire", "tcp1_gbps", "link of single packets, AES (WireGuard: ChaCha20)"),
        ("chacha", "tcp1_gbps", "link of super-packets, all with ChaCha20"),
        ("jumbo", "tcp1_gbps", "jumbo frames, AES (WireGuard: ChaCha20)"),
    ]),
    "idle": ("A connected tunnel without traffic", [
        ("gso", "idle_rss", None),
        ("gso", "idle_private", "private memory when idle, MB"),
        ("gso", "idle_wakeups", None),
        ("gso", "idle_cpu", None),
        ("gso", "start_ms", None),
        ("gso", "ping_p50", None),
    ]),
}

# Bars that look different: ours, and the link without an overlay.
KINDS = {"ours": "own", "raw": "raw"}


def write_plots(results, folder):
    """Writes the plots for which something was measured; their paths."""
    only = {scenario.name for scenario in results.scenarios}
    written = []
    for name, (title, wanted) in PLOTS.items():
        # A run with one scenario of its own stands in for all.
        if "gso" not in only:
            (single,) = only
            wanted = list({metric: (single, metric, METRICS[metric].title) for _, metric, _ in wanted}.values())
        panels = [panel(results, *one) for one in wanted]
        if not any(panel.bars for panel in panels):
            continue
        path = folder / f"{name}.svg"
        machine, _, rounds = results.origin().partition("; ")
        path.write_text(page(title, [machine, f"{rounds}; thin lines: least to most; in brackets: nebula-cni compared with this one"], panels))
        written.append(path)
    return written


def panel(results, scenario, metric_name, title):
    bars, metric = [], METRICS[metric_name]
    own = results.median(scenario, "ours", metric_name)
    for name, label in results.titles.items():
        value = results.median(scenario, name, metric_name)
        if value is not None:
            note = f"ours {compared(metric, own, value)}" if own and value and name not in ("ours", "raw") else ""
            bars.append(Bar(label, value, results.spread(scenario, name, metric_name), note, KINDS.get(name, "")))
    return Panel(title or metric.title, metric.more_is_better, bars)
