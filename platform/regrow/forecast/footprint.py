"""What one rank's device holds at the fullest moment of a step. Arithmetic alone: needs neither torch nor a device.

Walks through a step as FSDP2 runs it (torch 2.13, `torch/distributed/fsdp/_fully_shard`) and notes what is held:

- Forward gathers a group of parameters (the embedding, a block, the output) into one buffer and copies it out; the
  buffer goes when the next group is copied out, the copies when the group's forward is over.
- Backward gathers the next group while one is computed; the gradients of a group are copied into a buffer to be
  reduced, which goes when the next group has computed its own.

What a block keeps for its backward follows from the model's code, eager or, as torch.compile's partitioner chooses,
without what is cheap to compute again. What collectives take for themselves is left out, and what torch's allocator
reserves beyond. Checked in tests/dist/test_footprint.py, eager against allocations on CPU and compiled against what the
partitioner keeps there; against allocations on a GPU by `jobs.accept`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from regrow.config.schema import ActivationCheckpoint, Dtype, Float8, ModelConfig, ParallelConfig
from regrow.model.linears import block_linears
from regrow.model.size import Shapes, block_shapes, moment_bytes, outer_shapes
from regrow.plan.boxes import Box
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.plan.placement import placed

FLOAT32 = 4  # bytes
TOKEN_BYTES = 16  # ids of inputs and targets
KINDS = ("parameters", "optimizer", "gradients", "activations", "logits", "gathered", "reduced")


@dataclass(frozen=True)
class Rank:
    """One rank at one world size, and the largest pass that it runs."""

    model: ModelConfig
    parallel: ParallelConfig
    dp_shard: int  # that a copy of the model is sharded over, `parallel.cp` of a unit; times `parallel.tp` ranks
    num_passes: int
    rows: int  # sequences of a pass
    seq_len: int
    on_gpu: bool
    moments: Dtype = Dtype.float32
    more_in_flight: float = 0.0  # forwards of all its blocks whose backward is still to come, in a pipeline

    @property
    def tokens(self) -> int:
        """Of a pass that this rank computes: with `parallel.cp`, its share of each row's."""
        return self.rows * self.seq_len // self.parallel.cp

    @property
    def offloads(self) -> bool:
        """Whether shards, gradients and moments are not on the device; off a GPU there is nowhere else."""
        return self.parallel.cpu_offload and self.on_gpu

    @property
    def float8(self) -> Float8:
        """Of the steps that hold most: a tail in bfloat16 does."""
        return self.parallel.float8 if self.parallel.bfloat16_tail == 0 else Float8.none

    @property
    def item_bytes(self) -> int:
        """Of an element in compute."""
        return 2 if self.parallel.dtype is Dtype.bfloat16 else 4


@dataclass(frozen=True)
class Footprint:
    """Bytes by kind, at the fullest moment."""

    moment: str
    kinds: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclass
class Group:
    """Parameters that are gathered and reduced together; the rows of each padded to a multiple of the ranks."""

    padded: int  # elements
    shard: int  # elements of one rank
    whole_bytes: int  # as it is gathered
    largest: int  # elements of its largest parameter
    is_whole: bool = False
    arriving: int = 0  # bytes of the buffer that it is being gathered into
    unreduced: int = 0  # bytes of gradients that are not reduced yet
    is_reduced: bool = False  # holds its shard of the step's gradients


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one block, of all tokens of a pass."""

    kept: int  # from its forward to its backward
    again: int  # that its backward computes first, where checkpointing left it out
    backward: int  # more, at the fullest moment of its backward


class Ledger:
    """What is held, by kind, and what it was at its most."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.fullest = Footprint("", dict.fromkeys(KINDS, 0))

    def take(self, kind: str, num_bytes: int, moment: str) -> None:
        self.held[kind] += num_bytes
        if self.held.total() > self.fullest.total:
            self.fullest = Footprint(moment, {kind: self.held[kind] for kind in KINDS})

    def give(self, kind: str, num_bytes: int) -> None:
        self.held[kind] -= num_bytes
        assert self.held[kind] >= 0, f"{kind}: {-self.held[kind]} bytes more were given than taken"

    def briefly(self, kind: str, num_bytes: int, moment: str) -> None:
        self.take(kind, num_bytes, moment)
        self.give(kind, num_bytes)


def footprint(rank: Rank) -> Footprint:
    """The fullest moment of a rank's step."""
    return _Step(rank).walk()


def fsdp_groups(rank: Rank) -> tuple[Group | None, list[Group], Group]:
    """The embedding, the blocks, and the output; tied, the embedding belongs to the output, gathered first then."""
    model, item = rank.model, rank.item_bytes
    travels = 1 if rank.float8 is Float8.tensorwise_all_gather else item
    mesh = MeshShape(1, rank.dp_shard, rank.parallel.tp)

    def group(shapes: Shapes, linear_bytes: int = item) -> Group:
        wholes = [Box.whole(*each) for each in shapes.items()]
        shards = [placed(whole, Coordinates(mesh)).num_elements for whole in wholes]  # rank 0 has most
        gathered = (
            shard * (linear_bytes if len(whole.shape) > 1 else item)
            for shard, whole in zip(shards, wholes, strict=True)
        )
        return Group(
            padded=sum(shards) * rank.dp_shard,
            shard=sum(shards),
            whole_bytes=sum(gathered) * rank.dp_shard,
            largest=max(placed(whole, Coordinates(replace(mesh, dp_shard=1))).num_elements for whole in wholes),
        )

    outer, block = outer_shapes(model), group(block_shapes(model), travels)
    embed = {} if model.tied else {"embed.weight": outer.pop("embed.weight")}
    return group(embed) if embed else None, [replace(block) for _ in range(model.num_layers)], group(outer)


def num_in_shards(rank: Rank) -> int:
    """Elements of all shards of a rank."""
    embed, blocks, output = fsdp_groups(rank)
    return sum(group.shard for group in [*([embed] if embed else []), *blocks, output])


def block_activations(rank: Rank) -> BlockActivations:
    """What a block's backward needs, and when it is there.

    Eager: the inputs of both norms and their outputs, q, k, v and the attention's output, and of the feed-forward gate,
    up, silu(gate) and the product. Compiled: silu(gate) is computed again, and norms' outputs and the product where
    they are wanted in float8: what weights' gradients are made of in bfloat16 is kept. Selective
    checkpointing keeps the block's input and the results of matrix products and attention, eager also the last one's.
    Under tensor parallelism the stream, heads and feed-forward are shared out; what is gathered and scattered is whole.
    Under context parallelism attention keeps keys and values of whole rows, or gathers them again, and adds up their
    gradients: `cp` times those of the rank's own tokens. A CPU's mask is left out.
    """
    model, item, mode, tp = rank.model, rank.item_bytes, rank.parallel.activation_checkpoint, rank.parallel.tp
    compiled, cp = rank.parallel.compile, rank.parallel.cp
    linears = block_linears(model, tp)
    dim, kv, ffn, mine = model.dim, linears["wk"][0], linears["w1"][0], model.dim / tp
    # a CPU's norms are made of several operations, and keep both what they are given and what they scale in float32
    norms = 2 * mine * (item if rank.on_gpu else 2 * FLOAT32)
    sums = FLOAT32 * (model.num_heads + 2) / tp  # of exponentials, and of squares
    used = item * (2 * dim + 2 * mine + 2 * kv * cp + 4 * ffn) + norms + sums
    in_float8 = compiled and rank.float8 not in (Float8.none, Float8.rowwise_with_gw_hp)
    whole = used - (norms + item * ffn if in_float8 else 0)
    kept = {
        ActivationCheckpoint.none: whole - (item * ffn if compiled else 0),
        ActivationCheckpoint.selective: item * ((1 if compiled else 2) * dim + 3 * mine + 2 * kv + 2 * ffn) + sums,
        ActivationCheckpoint.full: item * mine,
    }[mode]
    again = used - kept if mode is not ActivationCheckpoint.none else 0
    if rank.parallel.activation_budget < 1:
        whole, kept = kept, item * mine + rank.parallel.activation_budget * (kept - item * mine)
        again = whole - kept
    backward = item * (dim + (4 if compiled else 2) * ffn)
    if cp > 1:  # gradients of whole keys and values, and as they are sent; those of the feed-forward are gone by then
        backward = max(backward, item * (2 * dim + 4 * kv * cp - 4 * ffn))
    return BlockActivations(*(round(each * rank.tokens) for each in (kept, max(0, again), backward)))


class _Step:
    """The walk, in the order of time. What is taken and not given back is held on."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.ledger = rank, Ledger()
        self.embed, self.blocks, self.output = fsdp_groups(rank)
        self.activations = block_activations(rank)
        self.whole_stream = rank.item_bytes * rank.tokens * rank.model.dim  # bytes of the last norm's output, gathered
        self.stream = self.whole_stream // rank.parallel.tp  # of the residual stream, or its gradient
        self.buffer = 0  # bytes that forward's newest gather went through
        self.reducing = 0  # bytes that backward's newest reduction goes through

    def walk(self) -> Footprint:
        rank, ledger = self.rank, self.ledger
        shards = num_in_shards(rank)
        if not rank.offloads:
            ledger.take("parameters", FLOAT32 * shards, "start")
            ledger.take("optimizer", moment_bytes(rank.moments) * shards, "start")
        ledger.take("activations", TOKEN_BYTES * rank.rows * rank.seq_len * rank.num_passes, "start")
        kept = len(self.blocks) * self.activations.kept + self.stream
        ledger.take("activations", round(rank.more_in_flight * kept), "start")
        num_passes = min(rank.num_passes, 3)  # those in the middle are all alike
        for number in range(num_passes):
            last = number == num_passes - 1
            self.forward()
            self.loss()
            self.backward(
                reduce=last or bool(rank.parallel.sync_every_micro_batch),
                free=last or rank.parallel.reshard_after_forward,
            )
        return ledger.fullest

    def forward(self) -> None:
        ledger, ahead = self.ledger, self.rank.parallel.prefetch_blocks
        following = self.blocks if self.embed is None else [*self.blocks, self.output]
        if self.embed is None:
            self.gather(self.output)
        else:
            self.gather(self.embed, following[:ahead])
            self.release(self.embed)
        for number, block in enumerate(self.blocks, 1):
            self.gather(block, following[number : number + ahead])
            ledger.take("activations", self.activations.kept, "forward")
            self.release(block)
        ledger.take("activations", self.stream, "forward")
        if self.embed is not None:
            self.gather(self.output)

    def loss(self) -> None:
        """Up to the gradients of the output weights and of the residual stream, which takes the stream's place."""
        rank, ledger, item = self.rank, self.ledger, self.rank.item_bytes
        chunk = rank.parallel.loss_chunk_tokens or (rank.tokens if rank.parallel.tp > 1 else 0)
        # what the last norm gives, and keeps
        norms = self.whole_stream + (0 if rank.on_gpu else FLOAT32 * rank.tokens * rank.model.dim // rank.parallel.tp)
        ledger.take("activations", norms, "loss")
        num_chunks = max(1, math.ceil(rank.tokens / chunk)) if chunk else 1
        logits = math.ceil(rank.tokens / num_chunks) * (rank.model.vocab_size // rank.parallel.tp)  # elements
        made = self.new_gradients(self.output)
        if chunk:  # within forward
            in_float32 = num_chunks > 1 and item < FLOAT32
            summed = FLOAT32 * self.output.largest if num_chunks > 1 else 0
            ledger.take("gradients", summed, "loss")
            ledger.take("activations", self.whole_stream, "loss")  # its gradient
            ledger.briefly("logits", logits * self.bytes_per_logit(), "loss")
            ledger.take("logits", logits * item, "loss")  # their gradient
            ledger.briefly("gradients", 0 if summed and not in_float32 else made, "loss")
            ledger.give("logits", logits * item)
            self.drop_buffer()
            ledger.briefly("gradients", made if in_float32 else 0, "loss")
            ledger.give("activations", self.whole_stream)
            ledger.give("gradients", summed)
        else:
            ledger.briefly("logits", logits * item, "loss")
            self.drop_buffer()
            ledger.briefly("logits", logits * self.bytes_per_logit(), "loss")
            ledger.take("logits", logits * item, "loss")  # their gradient
            ledger.briefly("gradients", made, "loss")
            ledger.give("logits", logits * item)
        ledger.give("activations", norms)
        self.add_gradients(self.output, made)

    def bytes_per_logit(self) -> int:
        """At the fullest moment of the loss."""
        rank, item = self.rank, self.rank.item_bytes
        if rank.parallel.compile and rank.on_gpu:
            return 2 * item  # the logits and their gradient, all else is fused
        if not rank.parallel.loss_chunk_tokens:
            return 3 * FLOAT32  # log-probabilities, their gradient, and that of the logits
        upcast = FLOAT32 if item < FLOAT32 and not rank.on_gpu else 0
        return item + upcast + FLOAT32  # the logits, in float32 too, log-probabilities; bfloat16 gradients fit in later

    def backward(self, *, reduce: bool, free: bool) -> None:
        rank, ledger, used = self.rank, self.ledger, self.activations
        queue = [*reversed(self.blocks), *([self.embed] if self.embed else [])]
        ahead = rank.parallel.prefetch_blocks
        self.prefetch(queue[:ahead], "backward")
        if self.embed is not None:
            self.finish(self.output, reduce=reduce, free=free)
        for number, group in enumerate(queue, 1):
            self.arrive(group)
            self.prefetch(queue[number : number + ahead], "backward")
            if group is not self.embed:
                down = min(
                    self.new_gradients(group), rank.item_bytes * rank.model.dim * rank.model.ffn_dim // rank.parallel.tp
                )
                ledger.take("activations", used.again, "backward")
                ledger.take("gradients", down, "backward")
                ledger.briefly("activations", used.backward, "backward")
                ledger.give("gradients", down)
                ledger.give("activations", used.again + used.kept)
            self.add_gradients(group, self.new_gradients(group))
            self.finish(group, reduce=reduce, free=free)
        if self.embed is None:  # the table's gradient as embedding, before it is added to that as output
            ledger.briefly("gradients", rank.item_bytes * self.output.largest, "backward")
            self.finish(self.output, reduce=reduce, free=free)
        ledger.give("activations", self.stream)
        ledger.give("reduced", self.reducing)
        self.reducing = 0

    def gather(self, group: Group, following: Sequence[Group] = ()) -> None:
        """For forward, whose buffer stays until the next group is there."""
        if not group.is_whole:
            self.prefetch([group], "forward")
            self.drop_buffer()
            self.buffer, group.arriving = group.arriving, 0
            self.ledger.take("gathered", group.whole_bytes, "forward")
            group.is_whole = True
        if self.rank.parallel.prefetch_blocks > 1:  # else the next one's gather begins when its forward does
            self.prefetch(following, "forward")

    def drop_buffer(self) -> None:
        self.ledger.give("gathered", self.buffer)
        self.buffer = 0

    def release(self, group: Group) -> None:
        if self.rank.parallel.reshard_after_forward:
            self.ledger.give("gathered", group.whole_bytes)
            group.is_whole = False

    def prefetch(self, groups: Sequence[Group], moment: str) -> None:
        for group in groups:
            if not group.is_whole and not group.arriving and self.rank.dp_shard > 1:
                group.arriving = group.whole_bytes
                self.ledger.take("gathered", group.arriving, moment)
                if self.rank.offloads:  # its shards, from the host
                    self.ledger.briefly("gathered", (FLOAT32 + self.rank.item_bytes) * group.shard, moment)

    def arrive(self, group: Group) -> None:
        if not group.is_whole:
            self.ledger.take("gathered", group.whole_bytes, "backward")
            self.ledger.give("gathered", group.arriving)
            group.is_whole, group.arriving = True, 0

    def new_gradients(self, group: Group) -> int:
        """Bytes that a backward makes; in float32 each is added to that of earlier passes as soon as it is made."""
        item = self.rank.item_bytes
        return item * (group.largest if group.unreduced and item == FLOAT32 else group.padded)

    def add_gradients(self, group: Group, made: int) -> None:
        self.ledger.take("gradients", made, "backward")
        if group.unreduced:
            self.ledger.give("gradients", made)
        else:
            group.unreduced = made

    def finish(self, group: Group, *, reduce: bool, free: bool) -> None:
        """A group's gradients are there: let its parameters go, and reduce, or keep all in float32."""
        ledger, rank = self.ledger, self.rank
        if free:
            ledger.give("gathered", group.whole_bytes)
            group.is_whole = False
        whole, shard = FLOAT32 * group.padded, FLOAT32 * group.shard
        if not reduce:
            if group.unreduced < whole:
                ledger.take("gradients", whole, "backward")
                ledger.give("gradients", group.unreduced)
                group.unreduced = whole
            return
        ledger.give("reduced", self.reducing)
        self.reducing = whole
        ledger.take("reduced", whole, "backward")
        ledger.give("gradients", group.unreduced)
        group.unreduced = 0
        ledger.take("gradients", shard, "backward")
        if rank.dp_shard == 1:  # divided into another tensor
            ledger.briefly("reduced", whole, "backward")
        if group.is_reduced or rank.offloads:  # added to that of earlier passes, or gone to the host
            ledger.give("gradients", shard)
        group.is_reduced = True
