"""What is measured of one variant in one scenario."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import time

from .variants import Variant
from .world import OVER, UNDER, Failed, World

TICKS = os.sysconf("SC_CLK_TCK")
ANSWER_WITHIN = 20


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A link between the two ends, and what is measured on it for which variants."""

    name: str
    title: str
    tests: tuple
    variants: tuple
    link: str = "gso"
    mtu: int = 1300
    under_mtu: int = 1500
    settings: tuple = ()
    lighthouse: bool = False


@dataclasses.dataclass(frozen=True)
class Metric:
    """What a metric is called, whether more of it is better, and what one says of the better and of the worse of two."""

    title: str
    more_is_better: bool
    better: str
    worse: str


def rate(title):
    return Metric(title, True, "faster", "slower")


def delay(title):
    return Metric(title, False, "faster", "slower")


def cost(title):
    return Metric(title, False, "less", "more")


METRICS = {
    "tcp1_gbps": rate("TCP, 1 stream, Gbit/s"),
    "tcp1_cpu": cost("TCP, 1 stream, CPU s per GB"),
    "tcp4_gbps": rate("TCP, 4 streams, Gbit/s"),
    "tcp4_cpu": cost("TCP, 4 streams, CPU s per GB"),
    "tcpbi_gbps": rate("TCP, both directions, Gbit/s"),
    "tcpbi_cpu": cost("TCP, both directions, CPU s per GB"),
    "udp64_kpps": rate("UDP, 64 bytes, kpps"),
    "udp64_cpu": cost("UDP, 64 bytes, CPU s per GB"),
    "udp1200_kpps": rate("UDP, 1200 bytes, kpps"),
    "udp1200_cpu": cost("UDP, 1200 bytes, CPU s per GB"),
    "ping_p50": delay("ping, median, µs"),
    "ping_p99": delay("ping, 99th percentile, µs"),
    "pingload_p50": delay("ping beside a TCP stream, median, µs"),
    "pingload_p99": delay("ping beside a TCP stream, 99th percentile, µs"),
    "start_ms": delay("start to first ping, ms"),
    "idle_rss": cost("memory when idle (RSS), MB"),
    "idle_private": cost("private memory when idle, MB"),
    "idle_wakeups": cost("wake-ups per second when idle"),
    "idle_cpu": cost("CPU when idle, µs per s"),
    "peak_rss": cost("peak memory (RSS), MB"),
    "binary_mb": cost("program size, MB"),
}
TESTS = ["start", "idle", "ping", "tcp1", "pingload", "tcp4", "tcpbi", "udp64", "udp1200"]
THROUGHPUT = {
    "tcp1": ([], 0),
    "tcp4": (["-P", "4"], 0),
    "tcpbi": (["--bidir"], 0),
    "udp64": (["-u", "-b", "0", "-l", "64"], 64),
    "udp1200": (["-u", "-b", "0", "-l", "1200"], 1200),
}


def measure(world: World, tool: pathlib.Path, scenario: Scenario, variant: Variant, seconds, note):
    """Measures one variant once; `note` takes each metric with its value."""
    try:
        world.join(scenario.link, scenario.under_mtu, scenario.lighthouse)
        target = start(world, tool, scenario, variant, note)
        if "start" not in scenario.tests or len(scenario.tests) > 1:
            exercise(world, scenario, variant, target, seconds, note)
    finally:
        world.clear()


def start(world, tool, scenario, variant, note):
    """Starts the daemons; the address at which b answers."""
    if not variant.programs:
        return UNDER["b"]
    if variant.is_nebula:
        world.certify(tool)
    if scenario.lighthouse:
        world.start("l", variant, scenario.mtu, True)
        time.sleep(0.3)
    world.start("b", variant, scenario.mtu, scenario.lighthouse)
    # Its device is there, and it told a lighthouse of itself.
    time.sleep(1)
    begun = time.monotonic()
    world.start("a", variant, scenario.mtu, scenario.lighthouse)
    while not world.answers("a", OVER["b"]):
        if time.monotonic() - begun > ANSWER_WITHIN:
            raise Failed(f"no answer through the tunnel: {world.last_words()}")
    if "start" in scenario.tests:
        note("start_ms", (time.monotonic() - begun) * 1000)
    return OVER["b"]


def exercise(world, scenario, variant, target, seconds, note):
    tests, pid = scenario.tests, world.pids.get("a")
    if pid and "idle" in tests:
        time.sleep(2)
        note("idle_rss", status(pid, "VmRSS") / 1024)
        note("idle_private", private(pid) / 1024)
        before = threads(pid)
        time.sleep(4)
        woken, spent = (now - then for now, then in zip(threads(pid), before))
        note("idle_wakeups", woken / 4)
        note("idle_cpu", spent / 4 / 1000)
    world.run_in("b", "iperf3", "-s", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(0.3)
    if "ping" in tests:
        pings(world, target, ["-c", "500", "-i", "0.002"], "ping", note)
    for test in [test for test in tests if test in THROUGHPUT or test == "pingload"]:
        if test == "pingload":
            stream = world.run_in("a", "iperf3", "-c", target, "-t", "4", stdout=subprocess.DEVNULL)
            time.sleep(0.7)
            pings(world, target, ["-c", "250", "-i", "0.01"], "pingload", note)
            stream.wait()
        else:
            throughput(world, test, target, seconds, note)
    if pid and len(tests) > 2:
        note("peak_rss", max(status(pid, "VmHWM") for pid in world.pids.values()) / 1024)
        if binary := variant.binary():
            note("binary_mb", binary.stat().st_size / 1e6)


def throughput(world, test, target, seconds, note):
    words, size = THROUGHPUT[test]
    before = processor_seconds(world)
    said = world.output_in("a", "timeout", str(seconds + 10), "iperf3", "--json", "-c", target, "-t", str(seconds), *words)
    spent = processor_seconds(world) - before
    try:
        end = json.loads(said)["end"]
        if size:
            arrived = end["sum"]["packets"] - end["sum"]["lost_packets"]
            moved = arrived * size
            note(f"{test}_kpps", arrived / end["sum"]["seconds"] / 1000)
        else:
            sums = [end[name] for name in ("sum_received", "sum_received_bidir_reverse") if name in end]
            moved = sum(one["bytes"] for one in sums)
            note(f"{test}_gbps", sum(one["bits_per_second"] for one in sums) / 1e9)
        if world.pids:
            note(f"{test}_cpu", spent / (moved / 1e9))
    except (ValueError, KeyError, ZeroDivisionError) as error:
        raise Failed(f"{test} gave no result") from error


def pings(world, target, words, metric, note):
    said = world.output_in("a", "ping", "-n", "-W", "1", *words, target)
    times = sorted(float(text) * 1000 for text in re.findall(r"time=([0-9.]+) ms", said))
    if not times:
        raise Failed(f"{metric}: no answer")
    note(f"{metric}_p50", times[len(times) // 2])
    note(f"{metric}_p99", times[min(len(times) - 1, int(len(times) * 0.99))])


def processor_seconds(world):
    """User and system time of the daemons of both ends so far."""
    stats = (pathlib.Path(f"/proc/{pid}/stat").read_text() for role, pid in world.pids.items() if role != "l")
    fields = (stat.rpartition(") ")[2].split() for stat in stats)
    return sum(int(field[11]) + int(field[12]) for field in fields) / TICKS


def status(pid, key):
    return int(re.search(rf"{key}:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1])


def private(pid):
    return sum(map(int, re.findall(r"Private_\w+:\s+(\d+)", pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text())))


def threads(pid):
    """Voluntary context switches and nanoseconds on a processor, of all threads."""
    tasks = list(pathlib.Path(f"/proc/{pid}/task").iterdir())
    woken = (re.search(r"voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text())[1] for task in tasks)
    spent = ((task / "schedstat").read_text().split()[0] for task in tasks)
    return sum(map(int, woken)), sum(map(int, spent))
