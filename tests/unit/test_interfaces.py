"""gloo and NCCL meet where Ray's nodes do."""

import os
import socket
import subprocess
import sys
import uuid
from ipaddress import IPv6Address
from pathlib import Path

import pytest

from regrow.runtime.hardware.interfaces import address_towards, interface_of, meet_at

NAMESPACES = os.geteuid() == 0 and subprocess.run(["unshare", "-n", "true"], check=False).returncode == 0


def test_the_interface_of_an_address_is_used_unless_another_is_named() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "^docker"}
    meet_at("127.0.0.1", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker"}
    environment = {}
    for nobodys in ("203.0.113.1", "2001:db8::1", "fe80::1%none", "a-host's-name"):  # RFC 5737, RFC 3849
        meet_at(nobodys, environment)
    assert environment == {}


def test_nccl_is_told_the_whole_name_of_an_interface() -> None:
    """It takes eth0 for a beginning: eth0.100, another network, would do as well."""
    environment: dict[str, str] = {}
    meet_at("127.0.0.1", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="a kernel without IPv6")
def test_the_interface_of_an_ipv6_address_is_found_however_that_is_written() -> None:
    assert interface_of("::1") == interface_of("0:0:0:0:0:0:0:1") == "lo"
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, *_, name = line.split()
        address = IPv6Address(bytes.fromhex(digits))
        assert address.is_link_local or interface_of(str(address)) == name  # which several may have


def test_the_way_to_a_host_is_found_by_its_name_or_address_and_none_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert address_towards("127.0.0.1") == address_towards("127.0.0.2") == "127.0.0.1"
    assert interface_of(address_towards("localhost")) == "lo"
    if Path("/proc/net/if_inet6").exists():
        assert address_towards("::1") == "::1"
    assert address_towards("x" * 64) == ""  # longer than a part of a name may be
    assert address_towards("255.255.255.255") == ""  # may not be sent to

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert address_towards("nowhere") == ""
    environment: dict[str, str] = {}
    meet_at("", environment)
    assert environment == {}


@pytest.mark.skipif(not NAMESPACES, reason="needs root and network namespaces")
def test_of_several_interfaces_the_one_with_the_address_is_found() -> None:
    code = (
        "from regrow.runtime.hardware.interfaces import interface_of as i; "
        "print(i('198.51.100.7'), i('203.0.113.9'), i('2001:db8::9'))"
    )
    one, two = (f"x{uuid.uuid4().hex[:8]}" for _ in range(2))
    script = (
        f"ip link add {one} type veth peer name {two} && ip addr add 198.51.100.7/24 dev {one} && "
        f"ip addr add 203.0.113.9/24 dev {two} && ip addr add 2001:db8::9/64 dev {two} && "
        f"ip link set {one} up && ip link set {two} up && "
        f'exec "{sys.executable}" -c "{code}"'
    )
    done = subprocess.run(["unshare", "-n", "sh", "-c", script], capture_output=True, text=True, check=False)
    if "Unknown device type" in done.stderr:
        pytest.skip("the kernel has no pairs of interfaces")
    assert done.stdout.split() == [one, two, two], done.stderr
    assert interface_of(socket.inet_ntoa(b"\xc6\x33\x64\x07")) is None
