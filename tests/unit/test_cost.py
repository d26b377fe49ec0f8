import dataclasses

import pytest

from regrow.forecast.cost import (
    HOST_LINK_BYTES_PER_S,
    HOST_MEMORY_BYTES_PER_S,
    NETWORK_SHARE,
    UPDATE_BYTES,
    Network,
    PassWork,
    Traffic,
    compute_s,
    seconds_per_byte,
    step_time,
)
from regrow.forecast.devices import DEVICES, GIB, Device, find_device

DEVICE = Device("slow", 0, flops=1e12, float8_flops=2e12, memory_bytes_per_s=1e9, link_bytes_per_s=1e8)
NETWORK = Network(ranks_per_node=8, bytes_per_s=1e7)
SHARES = DEVICE.shares


def test_arithmetic_of_each_kind_and_memory_traffic_add_up():
    work = PassWork(matmul_flops=3e12, float8_flops=4e12, attention_flops=5e12, memory_bytes=6e9)
    assert compute_s(work, DEVICE) == pytest.approx(
        3 / SHARES.matmul + 2 / SHARES.float8 + 5 / SHARES.attention + 6 / SHARES.memory
    )


def test_one_rank_gathers_from_nobody():
    assert seconds_per_byte(1, DEVICE, NETWORK) == 0.0


def test_within_a_node_links_count_and_between_nodes_the_network_of_all_of_a_nodes_ranks():
    assert seconds_per_byte(4, DEVICE, NETWORK) == pytest.approx(0.75 / 1e8 / NETWORK_SHARE)
    slow, fast = (dataclasses.replace(NETWORK, bytes_per_s=each) for each in (1e6, 1e9))
    assert seconds_per_byte(16, DEVICE, slow) == pytest.approx(0.5 / 8e6 / NETWORK_SHARE)
    assert seconds_per_byte(16, DEVICE, fast) == pytest.approx(15 / 16 / 1e8 / NETWORK_SHARE)


def step(
    work: PassWork,
    traffic: Traffic,
    passes: int = 3,
    every: bool = False,
    shard: int = 4,
    replicas: int = 1,
    on_host: bool = False,
):
    return step_time(
        work,
        traffic,
        num_passes=passes,
        reduce_every_pass=every,
        shard_params=1e6,
        dp_shard=shard,
        dp_replicate=replicas,
        on_host=on_host,
        device=DEVICE,
        network=NETWORK,
    )


UPDATE = UPDATE_BYTES * 1e6 / 1e9 / SHARES.memory


def test_a_pass_takes_as_long_as_the_longer_of_computing_and_communicating():
    work, second = PassWork(0.0, 0.0, 0.0, 1e9 * SHARES.memory), 1 / seconds_per_byte(4, DEVICE, NETWORK)
    little, much = Traffic(0.5 * second, 0.25 * second, 0.0), Traffic(2 * second, 3 * second, 0.0)
    quiet, busy = step(work, little), step(work, much)
    assert (quiet.compute_s, busy.compute_s) == (pytest.approx(3.0), pytest.approx(3.0))
    assert quiet.network_s == pytest.approx(3 * 0.5 + 0.25)
    assert quiet.step_s == pytest.approx(3.0 + UPDATE)
    assert busy.step_s == pytest.approx(2 * 2 + (2 + 3) + UPDATE)  # reduced in the last pass
    assert step(work, much, every=True).step_s == pytest.approx(3 * (2 + 3) + UPDATE)
    assert (quiet.bound_by, busy.bound_by) == ("compute", "network")


def test_replicas_copy_shards_over_the_network_each_rank_by_itself_where_a_shard_fills_a_node():
    idle, copied = PassWork(0.0, 0.0, 0.0, 0.0), Traffic(0.0, 0.0, 1e6)
    want = 2 * 1e6 * 0.5 / 1e7 / NETWORK_SHARE
    assert step(idle, copied, shard=8, replicas=2).network_s == pytest.approx(want)
    assert step(idle, copied, shard=4, replicas=2).network_s == pytest.approx(2 * 1e6 * 0.5 / 1e8 / NETWORK_SHARE)


def test_what_is_on_the_host_travels_over_its_link_and_is_updated_with_a_share_of_its_memorys_speed():
    idle, link = PassWork(0.0, 0.0, 0.0, 0.0), HOST_LINK_BYTES_PER_S * NETWORK_SHARE
    found = step(idle, Traffic(0.0, 0.0, 0.0, from_host=2 * link, to_host=link), shard=8, on_host=True)
    assert found.network_s == pytest.approx(3 * 2 + 1)
    for shard, replicas, sharing in ((8, 1, 8), (8, 4, 8), (4, 1, 4), (2, 2, 4), (1, 1, 1)):
        found = step(idle, Traffic(0.0, 0.0, 0.0), shard=shard, replicas=replicas, on_host=True)
        share = HOST_MEMORY_BYTES_PER_S / sharing  # of the ranks that there are on a node
        assert found.update_s == pytest.approx(UPDATE_BYTES * 1e6 / share / SHARES.memory)


def test_a_device_is_found_by_its_longest_name():
    names = [device.name for device in DEVICES]
    for index, name in enumerate(names):
        found = find_device(f"NVIDIA {name} 80GB")
        assert found is not None
        assert found.name == name
        assert not any(earlier in name for earlier in names[:index])
    assert find_device("RTX 3090") is None
    for name, gib in (("NVIDIA GH200 480GB", 95), ("NVIDIA A100-SXM4-40GB", 39), ("NVIDIA A100-SXM4-80GB", 79)):
        device = find_device(name)
        assert device is not None
        assert device.memory_bytes // GIB == gib


def test_a_part_of_a_device_is_not_that_device():
    for name in ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"):
        assert find_device(name) is None
    assert find_device("h100-migration") is not None


def test_a_device_whose_number_goes_on_is_another_one():
    """Workstation cards of 8 GB had the memory and the speed of an A100."""
    for name in ("NVIDIA RTX A1000", "NVIDIA RTX A1000 Laptop GPU", "H1000"):
        assert find_device(name) is None
