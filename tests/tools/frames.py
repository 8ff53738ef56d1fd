#!/usr/bin/python3
"""Frames as a program with CAP_NET_RAW makes them, each with its name in it, and a listener that says which names arrived.

frames.py send INTERFACE FRAMES PARAMETERS    FRAMES: out or in (of an isolated pod), captured or clear (from or to a captured pod);
                                              PARAMETERS: JSON. Prints the names
frames.py listen [EXCLUDED INTERFACE]...      prints "ready" and, once its input ends, pairs of names and interfaces
"""
import ipaddress
import json
import select
import socket
import struct
import sys
import time

MARK = b"CLEAR:"


def mac(text):
    return bytes.fromhex(text.replace(":", ""))


def mark(name):
    return MARK + name.encode() + b";" + b"secret" * 4


def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip4(source, destination, protocol, payload, options=b"", fragment=0):
    source, destination = (ipaddress.IPv4Address(a).packed for a in (source, destination))
    words = 5 + len(options) // 4
    head = struct.pack("!BBHHHBBH4s4s", 0x40 | words, 0, words * 4 + len(payload), 7, fragment, 64, protocol, 0, source, destination)
    head = head[:10] + struct.pack("!H", checksum(head + options)) + head[12:]
    return head + options + payload


def ip6(source, destination, following, payload, hops=64):
    source, destination = (ipaddress.IPv6Address(a).packed for a in (source, destination))
    return struct.pack("!IHBB16s16s", 6 << 28, len(payload), following, hops, source, destination) + payload


def udp(source, destination, payload):
    return struct.pack("!HHHH", source, destination, 8 + len(payload), 0) + payload


def tcp(source, destination, flags, payload):
    return struct.pack("!HHIIBBHHH", source, destination, 1, 1, 5 << 4, flags, 1000, 0, 0) + payload


def echo(kind, payload):
    body = struct.pack("!BBHHH", kind, 0, 0, 77, 1) + payload
    return body[:2] + struct.pack("!H", checksum(body)) + body[4:]


def icmp6(kind, body):
    return struct.pack("!BBH", kind, 0, 0) + body


def ether(destination, source, kind, payload):
    return mac(destination) + mac(source) + struct.pack("!H", kind) + payload


def arp(operation, sha, spa, tha, tpa, rest=b""):
    spa, tpa = (ipaddress.IPv4Address(a).packed for a in (spa, tpa))
    return struct.pack("!HHBBH", 1, 0x800, 6, 4, operation) + sha + spa + tha + tpa + rest


BROADCAST = "ff:ff:ff:ff:ff:ff"
OTHER_MAC = "02:00:00:00:be:ef"
ACK, SYN = 0x18, 0x02


def outgoing(p):
    me, gateway, peer = p["mac"], p["gateway_mac"], p["peer_mac"]
    v4 = lambda to, packet, source=me: ether(to, source, 0x800, packet)
    yield "udp", v4(gateway, ip4(p["own4"], p["out4"], 17, udp(999, 9999, mark("udp"))))
    yield "tcp", v4(gateway, ip4(p["own4"], p["out4"], 6, tcp(999, 9999, ACK, mark("tcp"))))
    yield "echo", v4(gateway, ip4(p["own4"], p["out4"], 1, echo(8, mark("echo"))))
    yield "echo-reply", v4(gateway, ip4(p["own4"], p["out4"], 1, echo(0, mark("echo-reply"))))
    yield "like-an-answer", v4(gateway, ip4(p["own4"], p["out4"], 17, udp(53, 9999, mark("like-an-answer"))))
    yield "tcp-to-node", v4(gateway, ip4(p["own4"], p["node4"], 6, tcp(8080, 10250, ACK, mark("tcp-to-node"))))
    yield "udp-to-node", v4(gateway, ip4(p["own4"], p["node4"], 17, udp(8080, 9999, mark("udp-to-node"))))
    yield "peer", v4(peer, ip4(p["own4"], p["peer4"], 17, udp(999, 9999, mark("peer"))))
    dns = lambda name, **more: ip4(more.pop("source", p["own4"]), p["dns4"], 17, udp(999, 53, mark(name)), **more)
    yield "dns-to-peer-mac", v4(peer, dns("dns-to-peer-mac"))
    yield "dns-to-everybody", v4(BROADCAST, dns("dns-to-everybody"))
    yield "dns-other-source", v4(gateway, dns("dns-other-source", source=p["peer4"]))
    yield "dns-other-mac", v4(gateway, dns("dns-other-mac"), OTHER_MAC)
    route = b"\x83\x07\x04" + ipaddress.IPv4Address(p["out4"]).packed + b"\0"
    yield "dns-source-route", v4(gateway, dns("dns-source-route", options=route))
    yield "dns-fragment", v4(gateway, dns("dns-fragment", fragment=0x2001))
    yield "dns-last-fragment", v4(gateway, dns("dns-last-fragment", fragment=0x0003))
    yield "dns-in-ip", v4(gateway, ip4(p["own4"], p["dns4"], 4, dns("dns-in-ip")))
    yield "other-port", v4(gateway, ip4(p["own4"], p["dns4"], 17, udp(53, 54, mark("other-port"))))
    yield "broadcast", v4(BROADCAST, ip4(p["own4"], "255.255.255.255", 17, udp(68, 67, mark("broadcast"))))
    yield "multicast", v4("01:00:5e:00:00:fb", ip4(p["own4"], "224.0.0.251", 17, udp(5353, 5353, mark("multicast"))))
    for name, tags in [("vlan-0", [0x81000000]), ("vlan-5", [0x81000005]), ("vlan-twice", [0x88A80005, 0x81000006])]:
        tagged = b"".join(struct.pack("!I", tag) for tag in tags)
        for to, suffix in [(gateway, ""), (BROADCAST, "-broadcast")]:
            yield name + suffix, mac(to) + mac(me) + tagged + struct.pack("!H", 0x800) + dns(name + suffix)
    yield "local-ethertype", ether(BROADCAST, me, 0x88B5, mark("local-ethertype"))
    yield "ethertype-to-peer", ether(peer, me, 0x88B5, mark("ethertype-to-peer"))
    yield "mpls", ether(BROADCAST, me, 0x8847, b"\0\0\x11\x40" + dns("mpls"))
    yield "802.3", ether(BROADCAST, me, 60, b"\xaa\xaa\x03\0\0\0\x08\0" + mark("802.3"))
    sha, zero = mac(me), bytes(6)
    yield "arp-long", ether(BROADCAST, me, 0x806, arp(1, sha, p["own4"], zero, p["node4"], mark("arp-long")))
    yield "arp-filled", ether(BROADCAST, me, 0x806, arp(1, sha, p["own4"], MARK, p["node4"]))
    yield "arp-other-sender", ether(BROADCAST, me, 0x806, arp(1, MARK, p["own4"], zero, p["node4"]))
    yield "arp-unasked-reply", ether(peer, me, 0x806, arp(2, sha, p["own4"], MARK, p["peer4"]))
    yield "arp-poison", ether(BROADCAST, me, 0x806, arp(2, sha, p["node4"], MARK, p["peer4"]))
    if "own6" not in p:
        return
    v6 = lambda to, packet: ether(to, me, 0x86DD, packet)
    yield "udp6", v6(gateway, ip6(p["own6"], p["out6"], 17, udp(999, 9999, mark("udp6"))))
    yield "tcp6", v6(gateway, ip6(p["own6"], p["out6"], 6, tcp(999, 9999, ACK, mark("tcp6"))))
    yield "echo6", v6(gateway, ip6(p["own6"], p["out6"], 58, echo(128, mark("echo6"))))
    yield "tcp6-to-node", v6(gateway, ip6(p["own6"], p["node6"], 6, tcp(8080, 10250, ACK, mark("tcp6-to-node"))))
    yield "peer6", v6(peer, ip6(p["own6"], p["peer6"], 17, udp(999, 9999, mark("peer6"))))
    dns6 = lambda name: udp(999, 53, mark(name))
    yield "dns6-to-peer-mac", v6(peer, ip6(p["own6"], p["dns6"], 17, dns6("dns6-to-peer-mac")))
    yield "dns6-other-source", v6(gateway, ip6(p["peer6"], p["dns6"], 17, dns6("dns6-other-source")))
    for name, header in [("hop-by-hop6", 0), ("destination-options6", 60)]:
        options = bytes([17, 3, 0x3E, 28]) + mark(name)[:28].ljust(28, b"\0")
        yield name, v6(gateway, ip6(p["own6"], p["dns6"], header, options + dns6(name)))
    routing = bytes([17, 2, 4, 0, 0, 0, 0, 0]) + ipaddress.IPv6Address(p["out6"]).packed
    yield "routing6", v6(gateway, ip6(p["own6"], p["dns6"], 43, routing + dns6("routing6")))
    yield "fragment6", v6(gateway, ip6(p["own6"], p["dns6"], 44, struct.pack("!BBHI", 17, 0, 0x100, 7) + mark("fragment6")))
    yield "no-next-header6", v6(gateway, ip6(p["own6"], p["dns6"], 59, mark("no-next-header6")))
    all_nodes = "33:33:00:00:00:01"
    target = ipaddress.IPv6Address(p["node6"]).packed
    own = ipaddress.IPv6Address(p["own6"]).packed
    for name, body in [
        ("solicitation-long", icmp6(135, bytes(4) + target + b"\x01\x01" + sha + mark("solicitation-long"))),
        ("solicitation-filled", icmp6(135, bytes(4) + target + b"\x01\x01" + MARK)),
        ("advertisement-long", icmp6(136, bytes(4) + own + b"\x02\x01" + sha + mark("advertisement-long"))),
        ("advertisement-filled", icmp6(136, bytes(4) + own + b"\x02\x01" + MARK)),
        ("router-advertisement", icmp6(134, bytes(12) + mark("router-advertisement"))),
        ("redirect", icmp6(137, bytes(4) + target + own + mark("redirect"))),
    ]:
        yield name, v6(all_nodes, ip6(p["own6"], "ff02::1", 58, body, hops=255))


def incoming(p):
    me, pod = p["mac"], p["pod_mac"]
    v4 = lambda packet, to=pod, source=me: ether(to, source, 0x800, packet)
    yield "in-udp", v4(ip4(p["own4"], p["pod4"], 17, udp(999, 9999, mark("in-udp"))))
    yield "in-tcp", v4(ip4(p["own4"], p["pod4"], 6, tcp(999, 9999, SYN, mark("in-tcp"))))
    yield "in-tcp-ack", v4(ip4(p["own4"], p["pod4"], 6, tcp(53, 9999, ACK, mark("in-tcp-ack"))))
    yield "in-echo", v4(ip4(p["own4"], p["pod4"], 1, echo(8, mark("in-echo"))))
    yield "in-unasked-answer", v4(ip4(p["dns4"], p["pod4"], 17, udp(53, 31337, mark("in-unasked-answer"))))
    yield "in-as-node", v4(ip4(p["node4"], p["pod4"], 17, udp(999, 9999, mark("in-as-node"))))
    yield "in-as-node-tcp", v4(ip4(p["node4"], p["pod4"], 6, tcp(999, 9999, SYN, mark("in-as-node-tcp"))), source=p["gateway_mac"])
    yield "in-unreachable", v4(ip4(p["node4"], p["pod4"], 1, struct.pack("!BBHI", 3, 4, 0, 0) + mark("in-unreachable")))
    yield "in-fragment", v4(ip4(p["dns4"], p["pod4"], 17, mark("in-fragment"), fragment=0x0003))
    yield "in-broadcast", v4(ip4(p["own4"], "255.255.255.255", 17, udp(9, 9, mark("in-broadcast"))), BROADCAST)
    yield "in-ethertype", ether(pod, me, 0x88B5, mark("in-ethertype"))
    yield "in-vlan", mac(pod) + mac(me) + struct.pack("!IH", 0x81000005, 0x800) + ip4(p["dns4"], p["pod4"], 17, udp(53, 9, mark("in-vlan")))
    yield "in-arp-long", ether(pod, me, 0x806, arp(1, mac(me), p["node4"], bytes(6), p["pod4"], mark("in-arp-long")))
    yield "in-arp-foreign", ether(pod, me, 0x806, arp(1, MARK, p["own4"], bytes(6), p["pod4"]))
    if "own6" not in p:
        return
    v6 = lambda packet: ether(pod, me, 0x86DD, packet)
    yield "in-udp6", v6(ip6(p["own6"], p["pod6"], 17, udp(999, 9999, mark("in-udp6"))))
    yield "in-as-node6", v6(ip6(p["node6"], p["pod6"], 17, udp(999, 9999, mark("in-as-node6"))))
    yield "in-unasked-answer6", v6(ip6(p["dns6"], p["pod6"], 17, udp(53, 31337, mark("in-unasked-answer6"))))
    yield "in-no-next-header6", v6(ip6(p["node6"], p["pod6"], 59, mark("in-no-next-header6")))
    target = ipaddress.IPv6Address(p["pod6"]).packed
    solicitation = bytes(4) + target + b"\x01\x01" + mac(me) + mark("in-solicitation-long")
    yield "in-solicitation-long", v6(ip6(p["node6"], p["pod6"], 58, icmp6(135, solicitation), hops=255))
    redirect = bytes(4) + target + target + mark("in-redirect")
    yield "in-redirect", v6(ip6(p["node6"], p["pod6"], 58, icmp6(137, redirect), hops=255))
    yield "in-router", v6(ip6("fe80::1", p["pod6"], 58, icmp6(134, bytes(12) + mark("in-router")), hops=255))


def datagram(payload):
    return udp(999, 7000, payload)


def both_ways(p):
    """Packets for the peer, by the gateway and, on a bridge, straight to the peer."""
    own, peer, outside = p["own4"], p["peer4"], "203.0.113.9"
    v4 = lambda name, protocol, payload, **more: (name, 0x800, ip4(more.pop("source", own), more.pop("to", peer), protocol, payload, **more))
    yield v4("udp", 17, datagram(mark("udp")))
    yield v4("tcp", 6, tcp(999, 7000, ACK, mark("tcp")))
    yield v4("echo", 1, echo(8, mark("echo")))
    yield v4("sctp", 132, bytes(12) + mark("sctp"))
    yield v4("esp", 50, bytes(8) + mark("esp"))
    yield v4("any-protocol", 253, mark("any-protocol"))
    yield v4("first-fragment", 17, datagram(mark("first-fragment")), fragment=0x2000)
    yield v4("last-fragment", 17, mark("last-fragment"), fragment=0x0003)
    yield v4("in-ip", 4, ip4(own, peer, 17, datagram(mark("in-ip"))))
    route = b"\x83\x07\x04" + ipaddress.IPv4Address(peer).packed + b"\0"
    yield v4("source-route", 17, datagram(mark("source-route")), to=p["node4"], options=route)
    yield v4("other-source", 17, datagram(mark("other-source")), source=outside)
    yield v4("source-of-a-pod", 17, datagram(mark("source-of-a-pod")), source="10.244.9.9")
    yield v4("source-of-the-node", 17, datagram(mark("source-of-the-node")), source=p["node4"])
    yield v4("to-service", 17, datagram(mark("to-service")), to=p["service4"])
    yield v4("to-service-other-source", 17, datagram(mark("to-service-other-source")), to=p["service4"], source=outside)
    yield v4("to-remote", 17, datagram(mark("to-remote")), to=p["remote4"])
    yield v4("to-remote-service", 17, datagram(mark("to-remote-service")), to=p["remote_service4"])
    own6, peer6 = p["own6"], p["peer6"]
    v6 = lambda name, following, payload, source=own6, to=peer6: (name, 0x86DD, ip6(source, to, following, payload))
    yield v6("udp6", 17, datagram(mark("udp6")))
    yield v6("fragment6", 44, b"\x11\0\0\x01\0\0\0\7" + datagram(mark("fragment6")))
    yield v6("hop-by-hop6", 0, b"\x11\0\1\4\0\0\0\0" + datagram(mark("hop-by-hop6")))
    yield v6("other-source6", 17, datagram(mark("other-source6")), source="2001:db8::9")
    for name, tags in [("vlan-0", [0x81000000]), ("vlan-5", [0x81000005]), ("vlan-twice", [0x88A80005, 0x81000006])]:
        rest = b"".join(struct.pack("!I", tag) for tag in tags)[2:]
        yield name, struct.unpack("!I", struct.pack("!I", tags[0]))[0] >> 16, rest + b"\x08\0" + ip4(own, peer, 17, datagram(mark(name)))
    yield "mpls", 0x8847, b"\0\0\x11\x40" + ip4(own, peer, 17, datagram(mark("mpls")))
    yield "local-ethertype", 0x88B5, mark("local-ethertype")
    yield "802.3", 60, b"\xaa\xaa\x03\0\0\0\x08\0" + mark("802.3")
    yield "cut-short", 0x800, b"\x45" + mark("cut-short")[:18].split(b";")[0] + b";"


def captured(p):
    ways = [("", p["gateway_mac"])] + ([("@peer", p["peer_mac"])] if p["peer_mac"] else [])
    for suffix, to in ways:
        for name, kind, packet in both_ways(p):
            yield name + suffix, ether(to, p["mac"], kind, packet)
    if not p["peer_mac"]:
        return
    own, outside = p["own4"], "203.0.113.9"
    yield "outside@peer", ether(p["peer_mac"], p["mac"], 0x800, ip4(own, outside, 17, datagram(mark("outside@peer"))))
    yield "foreign@peer", ether(p["peer_mac"], p["mac"], 0x800, ip4(outside, "198.51.100.1", 17, datagram(mark("foreign@peer"))))
    yield "broadcast", ether(BROADCAST, p["mac"], 0x800, ip4(own, "255.255.255.255", 17, datagram(mark("broadcast"))))
    yield "no-source", ether(BROADCAST, p["mac"], 0x800, ip4("0.0.0.0", "255.255.255.255", 17, datagram(mark("no-source"))))
    yield "multicast", ether("01:00:5e:00:00:fb", p["mac"], 0x800, ip4(own, "224.0.0.251", 17, datagram(mark("multicast"))))
    yield "link-local6", ether(p["peer_mac"], p["mac"], 0x86DD, ip6(p["local6"], p["peer_local6"], 17, datagram(mark("link-local6"))))
    solicitation = struct.pack("!BBHI", 135, 0, 0, 0) + ipaddress.IPv6Address(p["peer6"]).packed + b"\1\1" + mac(p["mac"]) + mark("solicitation6")
    yield "solicitation6", ether(p["peer_mac"], p["mac"], 0x86DD, ip6(p["local6"], p["peer_local6"], 58, solicitation, hops=255))
    yield "multicast6", ether("33:33:00:00:00:01", p["mac"], 0x86DD, ip6(p["local6"], "ff02::1", 17, datagram(mark("multicast6"))))
    arp = struct.pack("!HHBBH", 1, 0x800, 6, 4, 1) + mac(p["mac"]) + bytes(20)
    yield "arp", ether(BROADCAST, p["mac"], 0x806, arp + mark("arp"))


def clear(p):
    """To a captured pod, from a pod on its link that has no certificate, with its own source and forged ones."""
    pod4, pod6 = p["pod4"], p["pod6"]
    v4 = lambda name, protocol, payload, source, to=pod4, at=p["pod_mac"], **more: (
        name, ether(at, p["mac"], 0x800, ip4(source, to, protocol, payload, **more)))
    for by in ["plain", "node", "service", "outside", "other_node"]:
        source = p[by + "4"]
        named = lambda what: mark(f"{what}@{by}")
        yield v4(f"udp@{by}", 17, udp(53, 9999, named("udp")), source)
        yield v4(f"syn@{by}", 6, tcp(53, 9999, SYN, named("syn")), source)
        yield v4(f"syn-ece@{by}", 6, tcp(53, 9999, 0xC2, named("syn-ece")), source)
        yield v4(f"ack@{by}", 6, tcp(53, 9999, ACK, named("ack")), source)
        yield v4(f"echo@{by}", 1, echo(8, named("echo")), source)
        yield v4(f"echo-reply@{by}", 1, echo(0, named("echo-reply")), source)
        yield v4(f"sctp@{by}", 132, bytes(12) + named("sctp"), source)
        yield v4(f"esp@{by}", 50, bytes(8) + named("esp"), source)
        yield v4(f"in-ip@{by}", 4, ip4(source, pod4, 17, udp(53, 9999, named("in-ip"))), source)
        yield v4(f"first-fragment@{by}", 17, udp(53, 9999, named("first-fragment")), source, fragment=0x2000)
        yield v4(f"last-fragment@{by}", 17, named("last-fragment"), source, fragment=0x0003)
        # The flags are in the second fragment. There is no room for a name.
        yield v4(f"syn-in-fragments@{by}", 6, MARK + bytes(2), source, fragment=0x2000)
        yield v4(f"unreachable@{by}", 1, struct.pack("!BBHI", 3, 4, 0, 0) + ip4("10.244.9.9", pod4, 17, udp(1, 2, named("unreachable"))), source)
        yield v4(f"broadcast@{by}", 17, udp(53, 9999, named("broadcast")), source, to="255.255.255.255", at=BROADCAST)
        yield v4(f"multicast@{by}", 17, udp(53, 9999, named("multicast")), source, to="224.0.0.251", at="01:00:5e:00:00:fb")
    yield v4("uncovered", 17, udp(53, 9999, mark("uncovered")), p["plain4"], to="172.16.0.7")
    yield v4("uncovered-broadcast", 17, udp(53, 9999, mark("uncovered-broadcast")), p["plain4"], to="172.16.0.7", at=BROADCAST)
    v6 = lambda name, following, payload, source: (name, ether(p["pod_mac"], p["mac"], 0x86DD, ip6(source, pod6, following, payload)))
    for by in ["plain", "node"]:
        source = p[by + "6"]
        named = lambda what: mark(f"{what}@{by}")
        yield v6(f"udp6@{by}", 17, udp(53, 9999, named("udp6")), source)
        yield v6(f"syn6@{by}", 6, tcp(53, 9999, SYN, named("syn6")), source)
        yield v6(f"echo6@{by}", 58, echo(128, named("echo6")), source)
        yield v6(f"hop-by-hop6@{by}", 0, b"\x11\0\1\4\0\0\0\0" + udp(53, 9999, named("hop-by-hop6")), source)
        yield v6(f"first-fragment6@{by}", 44, b"\x11\0\0\x01\0\0\0\7" + udp(53, 9999, named("first-fragment6")), source)
        yield v6(f"no-next-header6@{by}", 59, named("no-next-header6"), source)


SETS = {"out": outgoing, "in": incoming, "captured": captured, "clear": clear}


def send(interface, which, p):
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    link.bind((interface, 0))
    frames = list(SETS[which](p))
    for _ in range(3):
        for _, frame in frames:
            link.send(frame)
        time.sleep(0.05)
    print(json.dumps(sorted(name for name, _ in frames)))


def listen(excluded):
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    link.settimeout(0.1)
    print("ready", flush=True)
    until = None
    seen = set()
    while until is None or time.monotonic() < until:
        if until is None and select.select([sys.stdin], [], [], 0)[0]:
            until = time.monotonic() + 0.5
        try:
            frame, address = link.recvfrom(4096)
        except TimeoutError:
            continue
        # What this side of the link sends itself is no arrival.
        if address[0] in excluded or (address[2] == 4 and "own" in excluded):
            continue
        at = frame.find(MARK)
        if at >= 0:
            name = frame[at + len(MARK):].split(b";")[0].decode(errors="replace")
            seen.add((name if b";" in frame[at:] else "6 bytes in a frame of type " + frame[12:14].hex(), address[0]))
    print(json.dumps(sorted(seen)))


if sys.argv[1] == "send":
    send(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
else:
    listen(sys.argv[2:])
