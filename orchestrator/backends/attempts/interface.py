"""Selects the network interface of this machine that reaches an attempt's other ranks."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

from orchestrator.specs.command_line import Env

GLOO = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
ADDRESS = slice(20, 24)  # of struct ifreq: behind the name (16), the family (2) and the port (2)


def make_gloo_interface_variables(env: Env) -> dict[str, str]:
    """Return {"GLOO_SOCKET_IFNAME": interface towards MASTER_ADDR}; {} where it is not needed.

    It is not needed on one machine, where the variable is set, or where no interface has the
    address. By itself gloo takes the address of the host's name. On many machines that is
    127.0.1.1, which no other machine reaches.
    """
    master = env.get("MASTER_ADDR", "127.0.0.1")
    if master.startswith("127.") or GLOO in env:
        return {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[ADDRESS]) == address:
                    return {GLOO: name}
    return {}
