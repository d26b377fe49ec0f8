"""How long a step takes: arithmetic, memory traffic and collectives against what devices and links offer. Pure.

A roofline: in each pass a device computes, and gathers parameters and reduces gradients at the same time, whichever
takes longer; then it updates its shard. An estimate: what a step gets of a data sheet's promise, `Device.shares`, is
fitted to published speeds (devices.py).
"""

from dataclasses import dataclass

from regrow.forecast.devices import CALIBRATED_ON, PUBLISHED_SHARES, Device

NETWORK_SHARE = 0.8
HOST_LINK_BYTES_PER_S = 50e9  # between a GPU and its host, one way: PCIe 5, 16 lanes
HOST_MEMORY_BYTES_PER_S = 400e9  # of a node, which its ranks share
UPDATE_BYTES = 40  # of a parameter: AdamW reads and writes value and moments and reads the gradient, clipping all of it


@dataclass(frozen=True)
class Network:
    """How ranks are joined."""

    ranks_per_node: int
    bytes_per_s: float  # of one rank, to other nodes, one way
    keepers_bytes_per_s: float = 3e9  # of one node's keeper to another node, one way


@dataclass(frozen=True)
class PassWork:
    """What one rank does in one forward and backward."""

    matmul_flops: float  # bfloat16, or float32 on CPU
    float8_flops: float
    attention_flops: float
    memory_bytes: float  # that elementwise operations and copies move

    def times(self, share: float) -> "PassWork":
        """A share of it."""
        return PassWork(**{kind: share * each for kind, each in vars(self).items()})


@dataclass(frozen=True)
class Traffic:
    """Bytes of what one rank gathers and reduces in one pass, whole, as all its ranks have them together."""

    gathered: float  # parameters, over `dp_shard` ranks
    reduced: float  # gradients, over `dp_shard` ranks; where not every pass reduces, the last one
    copied: float  # shards of gradients, over `dp_replicate` ranks, with those
    from_host: float = 0.0  # of this rank's shards, which it gathers from there
    to_host: float = 0.0  # of their gradients
    tensor: float = 0.0  # activations, over the `tp` ranks of a unit, which wait for them
    context: float = 0.0  # keys and values, over the `cp` ranks that share rows, which wait for them

    def times(self, share: float) -> "Traffic":
        """A share of it."""
        return Traffic(**{kind: share * each for kind, each in vars(self).items()})


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. `compute_s` and `network_s` are each by themselves, `step_s` has them side by side."""

    compute_s: float
    network_s: float
    update_s: float
    step_s: float

    @property
    def bound_by(self) -> str:
        return "compute" if self.compute_s >= self.network_s else "network"


def assumptions(device: Device) -> tuple[str, ...]:
    """In words, for the reader of a forecast."""
    shares = device.shares
    fitted = CALIBRATED_ON if shares == PUBLISHED_SHARES else "of a peak that was measured here; not calibrated"
    return (
        f"{shares.matmul:.0%} of peak arithmetic in matrix products, {shares.float8:.0%} in float8, "
        f"{shares.attention:.0%} in attention, which skips what is masked; {shares.memory:.0%} of memory bandwidth; "
        f"{NETWORK_SHARE:.0%} of links",
        f"these shares are {fitted}",
        "collectives run beside arithmetic, a pass takes as long as the longer of the two; nodes are as full as can be",
        f"with parallel.cpu_offload, {HOST_LINK_BYTES_PER_S / 1e9:.0f} GB/s each way between a GPU and its host, and "
        f"{HOST_MEMORY_BYTES_PER_S / 1e9:.0f} of the host's memory for all of its ranks",
        "with parallel.activation_budget below 1, what a block may not keep is computed again, as if all of it cost "
        "the same: torch.compile looks for what costs least",
        "a commit takes as long as a node's snapshots from its keeper to its peers'; it adds what these bytes take of "
        "the links, for the share of a step in which collectives use them",
        "no waiting for data, stragglers, validation or checkpoints",
    )


def step_time(
    work: PassWork,
    traffic: Traffic,
    *,
    num_passes: int,
    reduce_every_pass: bool,
    shard_params: float,
    dp_shard: int,
    dp_replicate: int,
    tp: int = 1,
    cp: int = 1,
    on_host: bool = False,
    device: Device,
    network: Network,
    bubble_share: float = 0.0,
) -> StepTime:
    """Of `num_passes` alike, and an update of `shard_params` parameters, `on_host` or on the device. A pipeline fills
    and drains for a `bubble_share` of the passes' time; its messages are taken to hide behind them."""
    compute = compute_s(work, device) + traffic.tensor * seconds_per_byte(tp, device, network)
    # the shards of a block lie the ranks of tensor parallelism apart, and so do those that share rows
    units = Network(max(1, network.ranks_per_node // tp), network.bytes_per_s)
    compute += traffic.context * seconds_per_byte(cp, device, units)
    host_link = HOST_LINK_BYTES_PER_S * NETWORK_SHARE
    gather = traffic.gathered * seconds_per_byte(dp_shard, device, units) + traffic.from_host / host_link
    # replicas of a shard lie a replica's ranks apart; an all-reduce is a reduce-scatter and an all-gather
    spread = Network(max(1, units.ranks_per_node // dp_shard), units.bytes_per_s)
    reduce = traffic.reduced * seconds_per_byte(dp_shard, device, units) + traffic.to_host / host_link
    reduce += 2 * traffic.copied * seconds_per_byte(dp_replicate, device, spread)
    num_reducing = num_passes if reduce_every_pass else 1
    passes = num_reducing * max(compute, gather + reduce) + (num_passes - num_reducing) * max(compute, gather)
    passes /= 1.0 - bubble_share
    on_node = min(network.ranks_per_node, dp_shard * dp_replicate * tp * cp)
    memory = HOST_MEMORY_BYTES_PER_S / on_node if on_host else device.memory_bytes_per_s
    update = UPDATE_BYTES * shard_params / memory / device.shares.memory
    return StepTime(num_passes * compute, num_passes * gather + num_reducing * reduce, update, passes + update)


def compute_s(work: PassWork, device: Device) -> float:
    """One pass without collectives.

    >>> compute_s(PassWork(450.0, 0.0, 0.0, 0.0), Device("", 0, 1000.0, 2000.0, 1.0, 1.0))
    1.0
    """
    shares = device.shares
    products = work.matmul_flops / device.flops / shares.matmul
    products += work.float8_flops / device.float8_flops / shares.float8
    attention = work.attention_flops / device.flops
    memory = work.memory_bytes / device.memory_bytes_per_s
    return products + attention / shares.attention + memory / shares.memory


def seconds_per_byte(num_ranks: int, device: Device, network: Network) -> float:
    """Of an all-gather's result, or of a reduce-scatter's input, among so many ranks that fill node after node.

    Within a node it takes the links; between nodes, the network of all ranks of a node together.
    """
    on_node = min(num_ranks, network.ranks_per_node)
    num_nodes = num_ranks / on_node
    within = (num_ranks - 1) / num_ranks / device.link_bytes_per_s
    between = (num_nodes - 1) / num_nodes / (on_node * network.bytes_per_s)
    return max(within, between) / NETWORK_SHARE
