"""Medians of what was measured, as a Markdown table."""

import datetime
import os
import pathlib
import platform
import re
import statistics

from .measure import METRICS, Scenario


class Results:
    """Samples by scenario, variant and metric, and what the machine was."""

    def __init__(self, scenarios, rounds, seconds, command):
        self.scenarios, self.rounds, self.seconds, self.command = scenarios, rounds, seconds, command
        self.titles, self.samples = {}, {}
        self.machine = machine()
        self.date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        self.load = [load()]

    @classmethod
    def read(cls, document):
        """The results that `document` made such data of."""
        scenarios = [Scenario(one["name"], one["title"], (), tuple(one["variants"])) for one in document["scenarios"]]
        results = cls(scenarios, document["rounds"], document["seconds"], document["command"])
        results.machine, results.date, results.load = document["machine"], document["date"], document["load"]
        results.titles = document["titles"]
        for row in document["results"]:
            results.samples[row["scenario"], row["variant"], row["metric"]] = row["samples"]
        return results

    def note(self, scenario, variant, metric, value):
        self.titles[variant.name] = variant.title
        self.samples.setdefault((scenario.name, variant.name, metric), []).append(value)

    def median(self, scenario, variant, metric):
        """None if it was not measured."""
        samples = self.samples.get((scenario, variant, metric))
        return statistics.median(samples) if samples else None

    def spread(self, scenario, variant, metric):
        samples = self.samples[scenario, variant, metric]
        return min(samples), max(samples)

    def origin(self):
        """Where and when: one line."""
        return f"{self.machine}, {self.date}; medians of {self.rounds} interleaved rounds of {self.seconds} s"

    def document(self):
        """As data, for other programs."""
        rows = [{"scenario": scenario, "variant": variant, "metric": metric, "median": statistics.median(samples),
                 "samples": samples} for (scenario, variant, metric), samples in self.samples.items()]
        scenarios = [{"name": one.name, "title": one.title, "variants": one.variants} for one in self.scenarios]
        return {"command": self.command, "machine": self.machine, "date": self.date, "load": self.load,
                "rounds": self.rounds, "seconds": self.seconds, "titles": self.titles, "scenarios": scenarios,
                "results": rows}

    def markdown(self, plots):
        text = ["# Tunnels compared", "", f"{self.origin()}. `{self.command}` made this page. Load average before and after: "
                f"{' and '.join(self.load)}.", "",
                "Two network namespaces joined by a veth pair, one daemon in each; daemons, iperf3 and kernel share the "
                "processors. In brackets: the first column compared with this one. CPU is that of both daemons.", ""]
        text += [line for plot in plots for line in (f"![{plot.stem}]({plot.name})", "")]
        for scenario in self.scenarios:
            text += self.table(scenario)
        return "\n".join(text)

    def table(self, scenario):
        variants = [name for name in scenario.variants if any(key[:2] == (scenario.name, name) for key in self.samples)]
        metrics = [name for name in METRICS if any((scenario.name, variant, name) in self.samples for variant in variants)]
        if not metrics:
            return []
        lines = [f"## {scenario.title}", "", "| | " + " | ".join(self.titles[name] for name in variants) + " |",
                 "| --- |" + " ---: |" * len(variants)]
        for metric in metrics:
            first = self.median(scenario.name, variants[0], metric)
            cells = [cell(METRICS[metric], self.median(scenario.name, name, metric), first if name != variants[0] else None)
                     for name in variants]
            lines.append(f"| {METRICS[metric].title} | " + " | ".join(cells) + " |")
        return lines + [""]


def cell(metric, value, first):
    if value is None:
        return "-"
    return short(value) + (f" ({compared(metric, first, value)})" if first and value else "")


def compared(metric, own, other):
    """How `own` does beside `other`: "11.8x faster"."""
    better = own >= other if metric.more_is_better else own <= other
    times = max(own / other, other / own)
    return f"{short(times)}x {metric.better if better else metric.worse}"


def short(value):
    """Three digits that matter."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def machine():
    model = re.search(r"^model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    return f"{os.cpu_count()} CPUs of {model[1] if model else platform.machine()}, Linux {platform.release()}"


def load():
    return " ".join(pathlib.Path("/proc/loadavg").read_text().split()[:3])
