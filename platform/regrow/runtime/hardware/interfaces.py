"""Which network interface has an address: where gloo and NCCL are to meet.

Left alone, gloo binds to what the host's name resolves to, which is 127.0.1.1 on Debian and Ubuntu as they come: no
other host ever reaches it.
"""

import contextlib
import fcntl
import socket
import struct
from collections.abc import MutableMapping

_SIOCGIFADDR = 0x8915  # netdevice(7)


def interface_of(address: str) -> str | None:
    """The interface of this machine with an IPv4 address; None where none has it, as behind a translation of addresses.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def meet_at(address: str, environment: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL use the interface with this address, unless the environment names one."""
    name = interface_of(address)
    if name is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.setdefault(variable, name)
