"""Which metrics become which plot."""

from .measure import METRICS
from .plot import Panel, page

# Scenario and metric of each panel; the first plot is the README's.
PLOTS = {
    "overview": ("What the overlay costs", [
        ("gso", "tcp1_gbps", "TCP, 1 stream, Gbit/s"),
        ("gso", "tcp1_cpu", "CPU seconds of both daemons for a GB"),
        ("wire", "tcp1_gbps", "TCP on a link of single packets, Gbit/s"),
        ("gso", "udp64_kpps", "UDP of 64 bytes, 1000 packets/s"),
        ("gso", "pingload_p50", "ping beside a TCP stream, median, µs"),
        ("gso", "peak_rss", "memory of a daemon at most, MB"),
    ]),
    "links": ("TCP, 1 stream, Gbit/s", [
        ("gso", "tcp1_gbps", "super-packets whole, AES (WireGuard: ChaCha20)"),
        ("wire", "tcp1_gbps", "single packets, AES (WireGuard: ChaCha20)"),
        ("chacha", "tcp1_gbps", "super-packets whole, all with ChaCha20"),
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


def write_plots(results, folder):
    """Writes the plots for which something was measured; their paths."""
    only = {scenario.name for scenario in results.scenarios}
    written = []
    for name, (title, wanted) in PLOTS.items():
        # A run with one scenario of its own stands in for all.
        if "gso" not in only:
            (single,) = only
            wanted = list({metric: (single, metric, METRICS[metric][0]) for _, metric, _ in wanted}.values())
        panels = [panel(results, *one) for one in wanted]
        if not any(panel.bars for panel in panels):
            continue
        path = folder / f"{name}.svg"
        machine, _, rounds = results.origin().partition("; ")
        path.write_text(page(title, [machine, f"{rounds}; thin lines from least to most; in brackets: ours times or divided by this"], panels))
        written.append(path)
    return written


def panel(results, scenario, metric, title):
    bars = []
    for name, label in results.titles.items():
        value = results.median(scenario, name, metric)
        if value is not None:
            bars.append((label, value, *results.spread(scenario, name, metric), name == "ours"))
    default, more_is_better = METRICS[metric]
    return Panel(title or default, more_is_better, bars)
