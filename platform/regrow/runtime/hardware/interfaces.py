"""Which network interface has an address: where gloo and NCCL are to meet.

Left alone, gloo binds to what the host's name resolves to, which is 127.0.1.1 on Debian and Ubuntu as they come: no
other host ever reaches it.
"""

import contextlib
import fcntl
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

_SIOCGIFADDR = 0x8915  # netdevice(7)
_IPV6 = Path("/proc/net/if_inet6")  # a line an address: its 32 digits, four numbers, the interface's name


def interface_of(address: str) -> str | None:
    """The interface of this machine with an IPv4 or IPv6 address; None where none has it, as behind a translation of
    addresses, and for what is no address.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    if ":" in address:
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    with contextlib.suppress(OSError):  # no address, or a kernel without IPv6
        digits = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        for line in _IPV6.read_text().splitlines():
            found, *_, name = line.split()
            if found == digits:
                return name
    return None


def address_towards(host: str) -> str:
    """The address of this machine from which packets go to a host, by its name or address; empty where the name does
    not resolve, or no route leads there. Nothing is sent to the host.

    >>> address_towards("127.0.0.1")
    '127.0.0.1'
    """
    with contextlib.suppress(OSError, UnicodeError):  # UnicodeError: no name of a host
        for family, kind, _, _, there in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as asking:
                asking.connect(there)
                return str(asking.getsockname()[0])
    return ""


def meet_at(address: str, environment: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL use the interface with this address, unless the environment names one."""
    name = interface_of(address)
    if name is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", name)
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # that one: without "=" all whose names begin so
