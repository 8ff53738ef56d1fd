"""What is compared: a name, the programs of both ends, and settings."""

import dataclasses
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
OURS = ROOT / "target/x86_64-unknown-linux-gnu/release/nebula"
HOOKS = ROOT / "benches/hooks"
# As an administrator would who read about throughput: large socket buffers, a long queue of the device.
TUNED = {"listen.read_buffer": "10485760", "listen.write_buffer": "10485760", "tun.tx_queue": "5000"}
GO = {"go": "sid", "go-1.9.3": "trixie", "go-1.6.1": "bookworm"}
BUILT_IN = "ours, go (1.11.0), go-tuned, go-1.9.3, go-1.6.1, ours-to-go, go-to-ours, wireguard-go, boringtun, raw"


class Refused(Exception):
    """What the user asked for cannot be had."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """`programs`: of the ends a and b; none for no tunnel at all, one hook for both ends."""

    name: str
    title: str
    programs: tuple
    settings: dict
    hook: bool = False

    @property
    def is_nebula(self):
        return bool(self.programs) and not self.hook

    def binary(self):
        """The program of both ends, if a user would install one."""
        if not self.programs or len(set(self.programs)) > 1:
            return None
        return PEERS.get(self.name, self.programs[0]) if self.hook else self.programs[0]


PEERS = {
    "wireguard-go": ROOT / "target/peers/wireguard-go/usr/bin/wireguard-go",
    "boringtun": ROOT / "target/peers/boringtun/bin/boringtun-cli",
}


def fetch(script):
    """Runs a script that fetches programs; what it says about each, by its first word."""
    run = subprocess.run([ROOT / script], stdout=subprocess.PIPE, text=True)
    if run.returncode:
        raise Refused(f"{script} could not fetch the programs to compare with")
    return {words[0]: words[1:] for words in (line.split("\t") for line in run.stdout.splitlines())}


def build(names, extra):
    """The variants of these names; `extra` settings count for all that read Nebula's configuration."""
    go, other = {}, {}
    if any(name.startswith("go") or "go-" in name or name.endswith("-go") for name in names):
        go = fetch(".ci/go-nebula")
    if any(name in PEERS for name in names):
        other = fetch("benches/peers")
    return [variant(name, go, other, extra) for name in names]


def variant(name, go, other, extra):
    if "=" in name or ":" in name:
        return custom(name, extra)
    if name == "raw":
        return Variant(name, "no overlay", (), {})
    if name in other:
        return Variant(name, f"{name} {other[name][0].removeprefix('0.0.')}", (HOOKS / name,), {}, hook=True)
    newest = pathlib.Path(go["sid"][1]) / "nebula" if go else None
    if name == "ours":
        return Variant(name, "nebula-cni", (ours(), ours()), dict(extra))
    if name == "ours-to-go":
        return Variant(name, "nebula-cni to Go", (ours(), newest), dict(extra))
    if name == "go-to-ours":
        return Variant(name, "Go to nebula-cni", (newest, ours()), dict(extra))
    if name == "go-tuned":
        return Variant(name, f"Go {go['sid'][0]}, tuned", (newest, newest), TUNED | extra)
    if name in GO:
        version, folder = go[GO[name]]
        program = pathlib.Path(folder) / "nebula"
        return Variant(name, f"Go {version}", (program, program), dict(extra))
    raise Refused(f"no variant named {name}; there are: {BUILT_IN}, and NAME=BINARY[+BINARY][:SETTING=VALUE,...]")


def ours():
    if not OURS.exists():
        raise Refused("no release build; run: cargo build --release --bins --features nebula-cert/cli")
    return OURS


def custom(text, extra):
    """NAME=BINARY[+BINARY][:KEY=VALUE,...], or @HOOK in place of a binary."""
    words, _, settings = text.partition(":")
    name, _, what = words.partition("=")
    hook = what.startswith("@")
    programs = tuple(pathlib.Path(program).resolve() for program in what.lstrip("@").split("+"))
    if not name or len(programs) > 2 or not all(program.is_file() for program in programs):
        raise Refused(f"not NAME=BINARY with a program that can be run: {text}")
    pairs = dict(pair.partition("=")[::2] for pair in settings.split(",") if pair)
    return Variant(name, name, programs if hook else (programs[0], programs[-1]), extra | pairs, hook)
