#!/usr/bin/env python3
"""A primary CNI plugin that connects each pod to its node alone, the way Calico does.

A pod has addresses of one host (/32, /128) on a veth. Its default route leads to 169.254.1.1 and fe80::1 on that link:
the node answers ARP for the first (proxy ARP), and its end of the link has the second. The node has a host route to each
of the pod's addresses. Copy or link it into a plugin directory under the name the conflist uses; "ipam" is delegated to
(host-local, for example).
"""
import hashlib, ipaddress, json, os, subprocess, sys

VERSIONS = ["0.4.0", "1.0.0", "1.1.0"]


def fail(text):
    print(text)
    sys.exit(1)


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        fail(json.dumps({"cniVersion": conf["cniVersion"], "code": 100, "msg": " ".join(command), "details": done.stderr}))


def ipam():
    """Calls the ipam plugin with this call's own environment and input."""
    folders = os.environ["CNI_PATH"].split(":")
    program = next(p for p in (os.path.join(d, conf["ipam"]["type"]) for d in folders) if os.path.exists(p))
    done = subprocess.run([program], input=raw, capture_output=True, text=True)
    if done.returncode: fail(done.stdout or done.stderr)
    return done.stdout


def add(pod, ifname, link):
    addresses = [ipaddress.ip_interface(ip["address"]).ip for ip in json.loads(ipam())["ips"]]
    inside = lambda *command: run("nsenter", "--net=" + pod, *command)
    run("ip", "link", "add", link, "type", "veth", "peer", "name", ifname, "netns", pod)
    settings = ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", f"net.ipv4.conf.{link}.proxy_arp=1",
                f"net.ipv4.neigh.{link}.proxy_delay=0", f"net.ipv6.conf.{link}.accept_dad=0"]
    run("sysctl", "-qw", *settings)
    run("ip", "link", "set", link, "up")
    run("ip", "addr", "add", "fe80::1/64", "dev", link, "nodad")
    inside("sysctl", "-qw", f"net.ipv6.conf.{ifname}.accept_dad=0")
    inside("ip", "link", "set", ifname, "up")
    for address in addresses:
        host = f"{address}/{address.max_prefixlen}"
        inside("ip", "addr", "add", host, "dev", ifname)
        run("ip", "route", "add", host, "dev", link)
        if address.version == 4:
            inside("ip", "route", "add", "169.254.1.1", "dev", ifname, "scope", "link")
        gateway = "169.254.1.1" if address.version == 4 else "fe80::1"
        inside("ip", "route", "add", "default", "via", gateway, "dev", ifname)
    print(json.dumps({
        "cniVersion": conf["cniVersion"],
        "interfaces": [{"name": link}, {"name": ifname, "sandbox": pod}],
        "ips": [{"address": f"{address}/{address.max_prefixlen}", "interface": 1} for address in addresses],
    }))


command, raw = os.environ["CNI_COMMAND"], sys.stdin.read()
conf = json.loads(raw) if raw.strip() else {}
if command == "VERSION":
    print(json.dumps({"cniVersion": conf.get("cniVersion", "1.0.0"), "supportedVersions": VERSIONS}))
elif command in ("ADD", "DEL"):
    attachment = os.environ["CNI_CONTAINERID"] + "/" + os.environ["CNI_IFNAME"]
    link = "link" + hashlib.sha256((conf["name"] + attachment).encode()).hexdigest()[:10]
    if command == "ADD":
        add(os.environ["CNI_NETNS"], os.environ["CNI_IFNAME"], link)
    else:
        subprocess.run(["ip", "link", "del", link], capture_output=True)
        ipam()
