#!/usr/bin/env python3
"""Attaches a program of eBPF to a device by tcx (Linux 6.6), as the data paths of Cilium and Calico do. It stays after this
ends, for as long as the device. Needs root; standard library only, and no compiler: the program is a few instructions.

  tcx.py DEVICE ingress|egress [TARGET]

Without TARGET the program leaves every frame to what comes behind it. With TARGET, the name of another device of this network
namespace, it sends every frame out there.
"""
import ctypes, os, platform, socket, struct, sys

SYSTEM_CALL = {"x86_64": 321, "aarch64": 280}[platform.machine()]
LOAD, ATTACH = 5, 8                             # BPF_PROG_LOAD, BPF_PROG_ATTACH
SCHED_CLS = 3                                   # BPF_PROG_TYPE_SCHED_CLS
HOOKS = {"ingress": 46, "egress": 47}           # BPF_TCX_INGRESS, BPF_TCX_EGRESS
REDIRECT, NEXT = 23, -1                         # BPF_FUNC_redirect, TCX_NEXT

libc = ctypes.CDLL(None, use_errno=True)


def bpf(command, attributes):
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = libc.syscall(SYSTEM_CALL, command, buffer, len(attributes))
    if result < 0:
        error = ctypes.get_errno()
        sys.exit(f"tcx: {os.strerror(error)}")
    return result


def instruction(code, register=0, immediate=0):
    return struct.pack("<BBhi", code, register, 0, immediate)


def program(target):
    if target is None:
        code = instruction(0xb7, 0, NEXT)       # r0 = TCX_NEXT
    else:
        code = instruction(0xb7, 1, target) + instruction(0xb7, 2) + instruction(0x85, 0, REDIRECT)
    return code + instruction(0x95)             # exit


device, hook, *rest = sys.argv[1:] if len(sys.argv) in (3, 4) else sys.exit(__doc__)
code = ctypes.create_string_buffer(program(socket.if_nametoindex(rest[0]) if rest else None))
licence = ctypes.create_string_buffer(b"GPL")
loaded = bpf(LOAD, struct.pack("=IIQQ", SCHED_CLS, len(code) // 8, ctypes.addressof(code), ctypes.addressof(licence)).ljust(128, b"\0"))
bpf(ATTACH, struct.pack("=IIII", socket.if_nametoindex(device), loaded, HOOKS[hook], 0).ljust(64, b"\0"))
