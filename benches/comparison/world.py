"""Network namespaces, what joins them, and the daemons inside. Nothing of it is left when it closes."""

import os
import pathlib
import subprocess
import tempfile
import time

# Addresses that are for documentation: TEST-NET-1 on the link, TEST-NET-2 in the overlay.
UNDER = {"a": "192.0.2.1", "b": "192.0.2.2", "l": "192.0.2.3"}
OVER = {"a": "198.51.100.1", "b": "198.51.100.2", "l": "198.51.100.3"}


class Failed(Exception):
    """A step of one measurement did not work; the others go on."""


class World:
    """`link`: `gso` hands super-packets over whole, as between pods of one machine; `wire` cuts them to single packets
    on sending and merges them on arrival, which is nearer to two machines."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="nebula-compare-"))
        self.spaces, self.children, self.pids = [], [], {}
        self.certificates = False

    def close(self):
        self.clear()
        for file in self.folder.iterdir():
            file.unlink()
        self.folder.rmdir()

    def clear(self):
        """Ends the daemons, removes the namespaces."""
        for pid in self.pids.values():
            end(pid)
        for child in self.children:
            child.terminate()
            try:
                child.wait(2)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self.children, self.pids = [], {}
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)
        self.spaces = []

    def space(self, role):
        return f"nebula-compare-{os.getpid()}-{role}"

    def add_space(self, role):
        must("ip", "netns", "add", self.space(role))
        self.spaces.append(self.space(role))
        must("ip", "-n", self.space(role), "link", "set", "lo", "up")

    def join(self, link, mtu, lighthouse):
        """Two hosts on a veth pair, or three on a bridge."""
        roles = ["a", "b", "l"] if lighthouse else ["a", "b"]
        for role in roles:
            self.add_space(role)
        veth = ["mtu", str(mtu), "type", "veth", "peer", "name", "eth0", "mtu", str(mtu), "netns"]
        if lighthouse:
            self.add_space("s")
            switch = ["ip", "-n", self.space("s"), "link"]
            must(*switch, "add", "br0", "type", "bridge", "forward_delay", "0")
            must(*switch, "set", "br0", "mtu", str(mtu), "up")
            for role in roles:
                must(*switch, "add", f"to-{role}", *veth, self.space(role))
                must(*switch, "set", f"to-{role}", "master", "br0", "up")
        else:
            must("ip", "-n", self.space("a"), "link", "add", "eth0", *veth, self.space("b"))
        for role in roles:
            must("ip", "-n", self.space(role), "addr", "add", f"{UNDER[role]}/24", "dev", "eth0")
            must("ip", "-n", self.space(role), "link", "set", "eth0", "up")
            if link == "wire":
                features = ["tso", "off", "tx-udp-segmentation", "off", "gro", "on"]
                must("ip", "netns", "exec", self.space(role), "ethtool", "-K", "eth0", *features)

    def certify(self, tool):
        """Certificates for all roles, once."""
        if self.certificates:
            return
        words = [["ca", "-name", "compare", "-duration", "48h"]]
        for role, address in OVER.items():
            words.append(["sign", "-name", role, "-ip", f"{address}/24", "-duration", "24h"])
        for command in words:
            must(str(tool), *command, cwd=self.folder)
        self.certificates = True

    def start(self, role, variant, mtu, lighthouse):
        """Starts the daemon of one end; it may not be ready yet."""
        if variant.hook:
            peer = "b" if role == "a" else "a"
            words = [UNDER[role], UNDER[peer], OVER[role], OVER[peer], str(mtu), str(self.folder)]
            with open(self.folder / f"{role}.log", "w") as log:
                hook = [str(variant.programs[0]), role, self.space(role), *words]
                if subprocess.run(hook, stdout=log, stderr=log).returncode:
                    raise Failed(f"the hook failed: {self.last_words()}")
            self.pids[role] = int((self.folder / f"{role}.pid").read_text())
            return
        program = variant.programs[0 if role == "a" else 1]
        file = self.folder / f"{role}.yml"
        file.write_text(self.configuration(role, variant.settings, mtu, lighthouse))
        with open(self.folder / f"{role}.log", "w") as log:
            child = self.run_in(role, str(program), "-config", str(file), stdout=log, stderr=log)
        self.pids[role] = child.pid

    def configuration(self, role, settings, mtu, lighthouse):
        serves = "l" if lighthouse else "b"
        knows = role != serves
        values = {
            "pki.ca": self.folder / "ca.crt",
            "pki.cert": self.folder / f"{role}.crt",
            "pki.key": self.folder / f"{role}.key",
            "static_host_map": f'{{"{OVER[serves]}": ["{UNDER[serves]}:4242"]}}' if knows else "{}",
            "lighthouse.am_lighthouse": str(not knows).lower(),
            "lighthouse.interval": 10,
            "lighthouse.hosts": f'["{OVER[serves]}"]' if knows else "[]",
            "listen.host": "0.0.0.0",
            "listen.port": 4242,
            "punchy.punch": "true",
            "tun.dev": "compare0",
            "tun.mtu": mtu,
            "logging.level": "error",
            "firewall.inbound": "[{port: any, proto: any, host: any}]",
            "firewall.outbound": "[{port: any, proto: any, host: any}]",
        } | settings
        text, sections = "", {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            if name:
                sections.setdefault(section, []).append(f"  {name}: {value}\n")
            else:
                text += f"{key}: {value}\n"
        return text + "".join(f"{section}:\n{''.join(lines)}" for section, lines in sections.items())

    def run_in(self, role, *command, **options):
        """Starts a command in a namespace; it ends with the world."""
        child = subprocess.Popen(["ip", "netns", "exec", self.space(role), *command], **options)
        self.children.append(child)
        return child

    def output_in(self, role, *command):
        done = subprocess.run(["ip", "netns", "exec", self.space(role), *command],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return done.stdout

    def answers(self, role, target):
        return "1 received" in self.output_in(role, "ping", "-q", "-n", "-c", "1", "-W", "1", target)

    def last_words(self):
        lines = [line for file in self.folder.glob("?.log") for line in file.read_text().splitlines()[-3:]]
        return " | ".join(lines)


def must(*command, cwd=None):
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(command)}: {done.stdout.strip()}")


def end(pid):
    """Ends a daemon that may be the child of a hook."""
    for signal, patience in ((15, 2), (9, 1)):
        try:
            os.kill(pid, signal)
        except ProcessLookupError:
            return
        until = time.monotonic() + patience
        while time.monotonic() < until:
            state = pathlib.Path(f"/proc/{pid}/stat")
            try:
                if state.read_text().rpartition(") ")[2][0] == "Z":
                    return
            except OSError:
                return
            time.sleep(0.01)
