"""Pipeline parallelism: the ranks of a unit have different stages, and hand micro-batches on to each other.

What each rank does in which order is `plan.pipeline`'s. Here it is done: nothing is kept from one step to the next, any
number of micro-batches of any two sizes goes through, two buffers a way hold what comes, and on a device the host waits
for nothing. torch.distributed.pipelining has a schedule for a fixed number, and a buffer for each of them.

A message has the shape that its receiver works out from the rows, which all ranks of a unit have. On gloo a shorter one
would fill the beginning of a buffer without an error, so the shape is in the tag: it never arrives, and the receive
fails at its deadline.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from regrow.model.llama import Llama
from regrow.parallel.fsdp import BACKENDS, Connecting, pipeline_group, tensor_group
from regrow.parallel.waits import Waits
from regrow.parallel.world import new_group
from regrow.plan.pipeline import Action, Stages, forwards_of, orders_of, received_by

Score = Callable[[Callable[..., Tensor], int], Tensor]  # of what runs the last stage, as a model, and a micro-batch
Prepare = Callable[[nn.Module, bool], None]  # a stage for its next backward, which may be its last one


class Verifying(Protocol):
    """Runs the stages of the first micro-batch, to compare what they come to with other units'."""

    def forward(self, stage: int, run: Callable[[], Tensor]) -> Tensor: ...

    def backward(self, stage: int, module: nn.Module, run: Callable[[], None], x: Tensor | None) -> None: ...


class Pipeline:
    """This rank's place among the stages of a model, and its connections to its neighbours. Collective to make."""

    def __init__(
        self,
        model: Llama,
        stages: Stages,
        mesh: DeviceMesh,
        *,
        dtype: torch.dtype,
        waits: Waits | None = None,
        connecting: Connecting = nullcontext,
    ) -> None:
        """`dtype` is that of the residual stream, which is what messages hold; `waits` times them; `connecting` is
        entered while communicators are made."""
        group, tensor = pipeline_group(mesh), tensor_group(mesh)
        assert group is not None, "the mesh has no pipeline"
        assert group.size() == stages.pp, f"{group.size()=} {stages.pp=}"
        self.stages, self.group, self.rank = stages, group, group.rank()
        self._modules, self._width, self._dtype = model.stages, model.config.dim, dtype
        self._share = model.share.cp * (tensor.size() if tensor is not None else 1)  # a rank has one part of a row
        self._device = torch.device(mesh.device_type)
        self._waits = waits or Waits(self._device)
        self._deadline: timedelta = group._get_backend(self._device).options._timeout
        # one way on one communicator, where a message waits for the one before it: round the ring of two ranks
        # activations go both ways
        ways = 2 if stages.per_rank > 1 else 1
        ranks = dist.get_process_group_ranks(group)
        self._groups = {
            # gloo keeps for its messages the timeout that a group was made with
            (forward, way): new_group(f"{'activations' if forward else 'gradients'}-{way}", ranks, self._deadline)
            for forward in (True, False)
            for way in range(ways)
        }
        self._tied = model.embed if model.config.tied else None  # of which both ends have a copy
        with connecting():
            self._connect()

    @property
    def counted_elsewhere(self) -> list[Tensor]:
        """Parameters whose gradients another rank of the pipeline counts."""
        return [self._tied.weight] if self._tied is not None and not self.has_output else []

    @property
    def has_output(self) -> bool:
        """Whether this rank has the last stage: it sees the loss."""
        return self.rank == self.stages.pp - 1

    def run(
        self,
        tokens: Sequence[Tensor],
        score: Score,
        *,
        prepare: Prepare | None = None,
        check: Callable[[], None] = lambda: None,
        verifying: Verifying | None = None,
    ) -> None:
        """Take micro-batches, int64 [m, T] each, through the stages forward and, with `prepare`, backward. Collective.

        `score` turns the last stage's output into the scalar whose gradient is wanted, on the rank that has it.
        `prepare` is called before each backward, `check` before everything, and may raise. The first micro-batch is
        `verifying`'s where there is one: of each stage its backward is the first, so that its gradients can be dropped.
        """
        pp, per_rank = self.stages.pp, self.stages.per_rank
        orders = (orders_of if prepare else forwards_of)(pp, per_rank, len(tokens))
        activations, gradients = (
            _Channel(self, forward, received_by(self.rank, orders, forward=forward), tokens)
            for forward in (True, False)
        )
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        for action in orders[self.rank]:
            check()
            is_last, stage = action.stage == self.stages.last, self._modules[action.stage]
            aside = verifying if action.micro_batch == 0 else None
            if action.is_forward:
                x = activations.receive(action).requires_grad_(prepare is not None) if action.stage else None
                forward, index = partial(stage, x), action.micro_batch
                run = partial(score, forward, index) if is_last else partial(forward, tokens[index])
                out = aside.forward(action.stage, run) if aside is not None else run()
                if not is_last:
                    activations.send(action, out.detach())
                if prepare is not None:
                    kept[action[1:]] = x, out
                continue
            assert prepare is not None
            x, out = kept.pop(action[1:])
            run_back = partial(out.backward, None if is_last else gradients.receive(action))
            if aside is not None:
                aside.backward(action.stage, stage, run_back, x)
            else:
                prepare(stage, action.micro_batch == len(tokens) - 1)
                run_back()
            if x is not None:
                assert x.grad is not None
                gradients.send(action, x.grad)
        activations.finish()
        gradients.finish()
        if prepare is not None:
            self._sum_tied_gradients()

    def _sum_tied_gradients(self) -> None:
        """Of an embedding that is the output, too: both ends have a part of its gradient, and then its whole."""
        gradient = self._tied.weight.grad if self._tied is not None else None
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if local is None or not local.numel():
            return
        theirs, peer, works = torch.empty_like(local), self.stages.pp - 1 - self.rank, []
        for sends in (peer > 0, peer == 0):  # one way after the other
            if sends:
                works.append(dist.isend(local, group=self.group, group_dst=peer))
            else:
                works.append(dist.irecv(theirs, group=self.group, group_src=peer))
        for work in works:
            self.wait(work)
        local += theirs  # the same bits at both ends

    def _connect(self) -> None:
        """One message over each connection, in an order that all ranks share: NCCL makes communicators when they are
        first used, and waits for the peer then."""
        pp, works = self.stages.pp, []
        for forward in (True, False):
            for sender in range(pp):
                receiver = (sender + (1 if forward else -1)) % pp
                if self.stages.per_rank == 1 and sender == (pp - 1 if forward else 0):
                    continue  # only several stages a rank go round the ring
                group, buffer = self.channel_group(forward, sender), torch.zeros(1, device=self._device)
                if self.rank == sender:
                    works.append((dist.isend(buffer, group=group, group_dst=receiver), buffer))
                elif self.rank == receiver:
                    works.append((dist.irecv(buffer, group=group, group_src=sender), buffer))
        for work, _ in works:
            self.wait(work)

    def channel_group(self, forward: bool, sender: int) -> dist.ProcessGroup:
        """The group by which a rank sends activations (forward) or gradients."""
        return self._groups[forward, sender % 2 if (forward, 1) in self._groups else 0]

    def empty(self, tokens_BT: Tensor) -> Tensor:
        """Memory for the residual stream of a micro-batch on this rank: [m, T, D], or its part of T."""
        rows, length = tokens_BT.shape
        return torch.empty(rows, length // self._share, self._width, dtype=self._dtype, device=self._device)

    def wait(self, work: Any) -> None:
        """Have what follows come after it. On gloo the host waits, at most until the deadline."""
        with self._waits.message():
            if dist.get_backend(self.group) == BACKENDS["cpu"]:
                work.wait(self._deadline)
            else:
                work.wait()  # with a timeout it would wait for the device


class _Channel:
    """Messages of one kind in one step, taken in the order in which they are sent, one receive ahead.

    Nothing waits for a send before the end: interleaved, that may end in a ring.
    """

    def __init__(self, pipeline: Pipeline, forward: bool, expected: Sequence[Action], tokens: Sequence[Tensor]) -> None:
        pp, rank, step = pipeline.stages.pp, pipeline.rank, 1 if forward else -1
        self._pipeline, self._tokens, self._step = pipeline, tokens, step
        self._source, self._target = (rank - step) % pp, (rank + step) % pp
        self._incoming = pipeline.channel_group(forward, self._source)
        self._outgoing = pipeline.channel_group(forward, rank)
        self._expected = deque(expected)
        self._posted: deque[tuple[Action, Tensor, Any]] = deque()
        self._sent: list[tuple[Tensor, Any]] = []

    def receive(self, action: Action) -> Tensor:
        """The input of an action, the next one that is expected."""
        while self._expected and len(self._posted) < 2:
            after = self._expected.popleft()
            buffer = self._pipeline.empty(self._tokens[after.micro_batch])
            work = dist.irecv(buffer, group=self._incoming, group_src=self._source, tag=_tag(after, buffer))
            self._posted.append((after, buffer, work))
        awaited, buffer, work = self._posted.popleft()
        assert awaited == action, f"{action} comes before {awaited}"
        with _explained(f"rank {self._source} of the pipeline", action, buffer):
            self._pipeline.wait(work)
        return buffer

    def send(self, action: Action, tensor: Tensor) -> None:
        """The result of an action, to the rank that goes on with it."""
        tensor, after = tensor.contiguous(), action._replace(stage=action.stage + self._step)
        self._sent = [(each, work) for each, work in self._sent if not work.is_completed()]
        work = dist.isend(tensor, group=self._outgoing, group_dst=self._target, tag=_tag(after, tensor))
        self._sent.append((tensor, work))

    def finish(self) -> None:
        """Come after everything that was sent."""
        assert not self._expected, f"{len(self._expected)} messages were not taken"
        assert not self._posted, f"{len(self._posted)} messages were not taken"
        for _, work in self._sent:
            self._pipeline.wait(work)


def _tag(action: Action, tensor: Tensor) -> int:
    """Of a message, by the action that takes it and its shape: on gloo, a message goes to the receive of its tag."""
    return zlib.crc32(f"{tuple(action)} {tuple(tensor.shape)} {tensor.dtype}".encode()) >> 1


@contextmanager
def _explained(source: str, action: Action, buffer: Tensor) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        kind = "activations" if action.is_forward else "gradients"
        error.add_note(
            f"waited for {kind} {list(buffer.shape)} of micro-batch {action.micro_batch} for stage {action.stage}, "
            f"from {source}"
        )
        raise
