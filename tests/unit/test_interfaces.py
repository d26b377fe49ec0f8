"""gloo and NCCL meet where Ray's nodes do."""

import os
import socket
import subprocess
import sys
import uuid

import pytest

from regrow.runtime.hardware.interfaces import interface_of, meet_at

NAMESPACES = os.geteuid() == 0 and subprocess.run(["unshare", "-n", "true"], check=False).returncode == 0


def test_the_interface_of_an_address_is_used_unless_another_is_named() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "^docker"}
    meet_at("127.0.0.1", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker"}
    environment = {}
    meet_at("203.0.113.1", environment)  # nobody's: RFC 5737
    assert environment == {}


@pytest.mark.skipif(not NAMESPACES, reason="needs root and network namespaces")
def test_of_several_interfaces_the_one_with_the_address_is_found() -> None:
    code = (
        "from regrow.runtime.hardware.interfaces import interface_of as i; print(i('198.51.100.7'), i('203.0.113.9'))"
    )
    one, two = (f"x{uuid.uuid4().hex[:8]}" for _ in range(2))
    script = (
        f"ip link add {one} type veth peer name {two} && ip addr add 198.51.100.7/24 dev {one} && "
        f"ip addr add 203.0.113.9/24 dev {two} && ip link set {one} up && ip link set {two} up && "
        f'exec "{sys.executable}" -c "{code}"'
    )
    done = subprocess.run(["unshare", "-n", "sh", "-c", script], capture_output=True, text=True, check=False)
    if "Unknown device type" in done.stderr:
        pytest.skip("the kernel has no pairs of interfaces")
    assert done.stdout.split() == [one, two], done.stderr
    assert interface_of(socket.inet_ntoa(b"\xc6\x33\x64\x07")) is None
