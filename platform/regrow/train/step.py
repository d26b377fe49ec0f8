"""One optimizer step over a global batch that does not depend on how many ranks share it.

Every rank brings its own micro-batches; all run the same number of passes, as FSDP's collectives demand. The loss and
the gradient are those of the whole global batch, each token counted once and equally. The host waits for nothing:
what it wants to know of step N, it reads after launching step N+1.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regrow.config.schema import ParallelConfig
from regrow.model.attention import take_BP
from regrow.model.loss import IGNORE_INDEX, ChunkLoss, chunked_cross_entropy, loss_and_gradient, sum_cross_entropy
from regrow.optim.adamw import clip_grad_norm_float64, set_lr, step_unless
from regrow.parallel.float8 import refresh_float8_scales
from regrow.parallel.fsdp import free_gathered, prepare_pass
from regrow.parallel.pipeline import Pipeline
from regrow.parallel.tensor_parallel import loss_and_gradient_of_cut, sum_uncut_gradients, uncut_parameters
from regrow.parallel.waits import ALL, Marks, Waits
from regrow.plan.share import WHOLE, Share
from regrow.state.entries import set_optimizer_step
from regrow.train.certificate import Certificate
from regrow.train.verify import UnitCheck, VerifyingPass

HEAD = 10  # numbers of a packed result before those of its verification
LIMB_BITS = 16  # a uint64 travels as four limbs, whose sums over 2**37 ranks float64 still holds exactly

# model, inputs and targets [m, T]; sum over valid ones
LossFunction = Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one step came to, the same on every rank."""

    loss: float  # mean over the valid tokens of the global batch, before the update
    grad_norm: float  # before clipping
    num_tokens: int  # valid targets in the global batch
    flag: bool  # some rank raised its flag
    blocked: bool  # some rank has no room for a snapshot
    digest: int  # sum of the ranks' digests modulo 2**64
    spacing: int = 0  # steps between snapshots, as one rank has heard; 0: it has not
    held: bool = False  # all nodes hold the snapshot that ranks were asked for
    checksums: tuple[float, ...] = ()  # of all units, where the step verifies; see `control.verification`

    @property
    def skipped(self) -> bool:
        """The gradient was not finite: nothing was learned from this batch."""
        return not math.isfinite(self.grad_norm)


class StepStats:
    """A step's result on its way to the host."""

    def __init__(
        self, packed: Tensor, certificate: Certificate | None = None, number: int = 0, marks: Marks | None = None
    ) -> None:
        self._certificate, self._number, self._marks = certificate, number, marks
        self._event: torch.cuda.Event | None = None
        self._host = packed
        if packed.is_cuda:
            self._host = torch.empty_like(packed, device="cpu", pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def resolve(self) -> StepResult:
        """The numbers; waits for the device to reach the end of this step, not further.

        Raises BrokenStep unless they are known to be those of the step: an event comes to pass after an abort, too.
        """
        if self._event is not None:
            self._event.synchronize()
        *values, grad_norm, num_tokens = self._host.tolist()
        loss, flag, blocked, lacked, spacing, *limbs, certified = values[:HEAD]
        if self._certificate is not None:
            self._certificate.check(self._number, certified)
        digest = sum(int(limb) << (LIMB_BITS * i) for i, limb in enumerate(limbs)) % 2**64
        checksums = tuple(values[HEAD:])
        flags = flag > 0, blocked > 0, digest, int(spacing), lacked == 0
        return StepResult(loss, grad_norm, int(num_tokens), *flags, checksums)

    def waits(self) -> dict[str, float]:
        """Seconds that this rank waited in collectives of each group (`parallel.waits`), once it is resolved."""
        return self._marks.seconds() if self._marks is not None else {}


class TrainStep:
    """Runs optimizer steps on a model that `build_model` made.

    `groups` are this rank's along each axis of the mesh, so that sums over one after the other are over all ranks;
    `shard_group` those among which one copy of the model is sharded: none and None for one process without FSDP.
    `tensor_group` are those that share one rank's rows, and the arithmetic on them; None where each has rows of its
    own. A `pipeline` has the model's stages on several ranks. `share` is what this rank has of each row's tokens, which
    is given to it whole. `keep_gathered` gathers parameters once a step instead of twice a micro-batch, for models
    built with `reshard_after_forward` off.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float,
        groups: Sequence[dist.ProcessGroup],
        shard_group: dist.ProcessGroup | None,
        tensor_group: dist.ProcessGroup | None = None,
        pipeline: Pipeline | None = None,
        share: Share = WHOLE,
        sync_every_micro_batch: bool = False,
        keep_gathered: bool = False,
        loss_function: LossFunction | None = None,
        waits: Waits | None = None,
        check: UnitCheck | None = None,
    ) -> None:
        """`waits` times the model's collectives, and the step's own. `check` is this rank's part of verifications."""
        self.certificate: Certificate | None = None  # of the generation whose steps these are
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.groups = groups
        self.tensor_group = tensor_group
        self.pipeline = pipeline
        self.share = share
        parts = (shard_group, tensor_group, pipeline.group if pipeline is not None else None)
        self.norm_groups = [each for each in parts if each is not None]
        self.counts = _counts(tensor_group, pipeline)
        self.counted_elsewhere: list[Tensor] = [
            *([] if _counts(tensor_group) else uncut_parameters(model)),
            *(pipeline.counted_elsewhere if pipeline is not None else []),
        ]
        self.sync_every_micro_batch = sync_every_micro_batch
        self.keep_gathered = keep_gathered
        self.loss_function = loss_function or whole_loss
        self.waits = waits or Waits(torch.device("cpu"))
        self.check = check

    def run(
        self,
        micro_batches: Sequence[Tensor],
        *,
        num_micro_batches: int,
        lr: float,
        flag: bool = False,
        blocked: bool = False,
        spacing: int = 0,
        held: bool = False,
        digest: int = 0,
        number: int = 0,
        before_update: Callable[[], None] | None = None,
        verifies: bool = False,
    ) -> StepStats:
        """Train on one global batch, in the step of this number. Collective over `groups`.

        `micro_batches` are this rank's rows, int64 [m, T+1] each on the model's device, at least one and at most
        `num_micro_batches`, which is the same on every rank: a short rank repeats its last one with every target
        ignored, which adds exactly nothing. `flag`, `blocked` (any rank), `held` (all), `spacing` and `digest` (sums)
        come back in the result.
        `before_update` is called before parameters and moments change. Where the step `verifies`, all units first
        compute the same micro-batch, and the result has their checksums. Raises BrokenStep, between micro-batches,
        where the generation is over.
        """
        assert 1 <= len(micro_batches) <= num_micro_batches, f"{len(micro_batches)=} {num_micro_batches=}"
        self.waits.take()  # what a validation has waited belongs to no step
        verifying = self._begin_to_verify(number) if verifies else None
        if verifying is not None and self.pipeline is None:
            self.verify(verifying)
        loss, num_tokens = self.accumulate(micro_batches, num_micro_batches, verifying)
        if before_update is not None:
            before_update()
        return self.update(
            loss,
            num_tokens,
            lr=lr,
            flag=flag,
            blocked=blocked,
            held=held,
            spacing=spacing,
            digest=digest,
            number=number,
            checksums=verifying.slots() if verifying is not None else None,
        )

    def _begin_to_verify(self, number: int) -> VerifyingPass:
        assert self.check is not None, "it was built without verified rows"
        return self.check.begin(number)

    def verify(self, verifying: VerifyingPass) -> None:
        """Forward and backward over rows that are the same on every rank."""
        inputs, targets = split_rows(verifying.rows, self.share)
        self._raise_if_over()
        loss = verifying.forward(0, lambda: self.loss_function(self.model, inputs, targets) / targets.numel())
        verifying.backward(0, self.model, loss.backward)

    def accumulate(
        self, micro_batches: Sequence[Tensor], num_micro_batches: int, verifying: VerifyingPass | None = None
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward over the global batch; this rank's share of its mean loss, and its valid tokens.

        In a pipeline the pass that verifies goes ahead of it.
        """
        pairs = [split_rows(rows, self.share) for rows in micro_batches]
        num_tokens = torch.stack([(targets != IGNORE_INDEX).sum() for _, targets in pairs]).sum() * self.counts
        self._all_reduce(num_tokens, self.groups)  # before the first backward, so that gradients need no second pass
        divisor = num_tokens.clamp(min=1)
        pairs = _filled_up(pairs, num_micro_batches)
        loss = torch.zeros((), dtype=torch.float64, device=num_tokens.device)

        def score(forward: Callable[..., Tensor], index: int) -> Tensor:
            share = self.loss_function(forward, *pairs[index]) / divisor
            loss.add_(share.detach() * self.counts)
            return share

        if self.pipeline is not None:
            ahead = [split_rows(verifying.rows, self.share)] if verifying is not None else []

            def score_of_all(forward: Callable[..., Tensor], index: int) -> Tensor:
                if index >= len(ahead):
                    return score(forward, index - len(ahead))
                tokens, targets = ahead[index]
                return self.loss_function(forward, tokens, targets) / targets.numel()

            self.pipeline.run(
                [inputs for inputs, _ in (*ahead, *pairs)],
                score_of_all,
                prepare=self._prepare,
                check=self._raise_if_over,
                verifying=verifying,
            )
        else:
            for index in range(num_micro_batches):
                self._raise_if_over()
                self._prepare(self.model, index == num_micro_batches - 1)
                score(self.model, index).backward()
        if self.tensor_group is not None:
            sum_uncut_gradients(self.model, self.tensor_group)
        return loss, num_tokens

    def _raise_if_over(self) -> None:
        if self.certificate is not None:
            self.certificate.raise_if_over()  # what is launched, a device has to come through before it is at rest

    def _prepare(self, model: nn.Module, last: bool) -> None:
        """For the next backward of a step, which may be its last one."""
        reduce, free = last or self.sync_every_micro_batch, last or not self.keep_gathered
        prepare_pass(model, reduce=reduce, free=free, last=last or self.pipeline is None)

    def update(
        self,
        loss: Tensor,
        num_tokens: Tensor,
        *,
        lr: float,
        flag: bool,
        blocked: bool,
        digest: int,
        spacing: int = 0,
        held: bool = False,
        number: int = 0,
        checksums: Tensor | None = None,
    ) -> StepStats:
        """Clip, step the optimizer, and send the packed result off: one sum for loss, flags, digest, checksums.

        A gradient that is not finite changes nothing.
        """
        grad_norm = clip_grad_norm_float64(
            self.model.parameters(),
            self.max_grad_norm,
            self.norm_groups,
            counted_elsewhere=self.counted_elsewhere,
            all_reduce=lambda square, group: self._all_reduce(square, [group]),
        )
        set_lr(self.optimizer, lr)
        step_unless(self.optimizer, ~grad_norm.isfinite())
        self.optimizer.zero_grad(set_to_none=True)
        refresh_float8_scales(self.model)
        mask = (1 << LIMB_BITS) - 1
        digest = digest if self.counts and self.share.rank == 0 else 0  # once a unit
        limbs = [(digest >> (LIMB_BITS * i)) & mask for i in range(4)]
        told = [float(flag), float(blocked), float(not held), float(spacing)]
        host = torch.tensor([*told, *limbs], dtype=torch.float64, pin_memory=loss.is_cuda)
        grad_norm = grad_norm.to(loss.device)  # it is computed where the gradients are
        share = loss.new_zeros(1) if self.certificate is None else self.certificate.field(number)
        packed = torch.cat([loss[None], host.to(loss.device, non_blocking=True), share])
        if checksums is not None:
            packed = torch.cat([packed, checksums])
        self._all_reduce(packed, self.groups)
        packed = torch.cat([packed, grad_norm[None], num_tokens.double()[None]])
        return StepStats(packed, self.certificate, number, self.waits.take())

    def _all_reduce(self, tensor: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
        for group in groups:
            with self.waits.inside(ALL):
                dist.all_reduce(tensor, group=group)


def go_on_from(step: TrainStep, number: int) -> None:
    """Parameters and moments are those after this step of the run: what is made of them is made anew. Collective."""
    set_optimizer_step(step.optimizer, number)
    refresh_float8_scales(step.model)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Sequence[Tensor],
    *,
    num_batches: int,
    groups: Sequence[dist.ProcessGroup],
    tensor_group: dist.ProcessGroup | None = None,
    pipeline: Pipeline | None = None,
    share: Share = WHOLE,
    loss_function: LossFunction | None = None,
    certificate: Certificate | None = None,
    number: int = 0,
) -> tuple[float, int]:
    """Sum of the loss over all valid targets of all ranks, and their number. Collective over `groups`; waits for it.

    `batches` are this rank's rows, int64 [m, T+1] each, at least one; every rank runs `num_batches` passes, repeating
    its last batch with every target ignored where it has fewer. Those of a `tensor_group`, of a `pipeline`, and that
    `share` tokens have the same rows. Of one shape they compile once; rows of IGNORE_INDEX fill them up and count
    nothing. Raises BrokenStep where the `certificate` does not vouch for the sums, by the step's number.
    """
    assert 1 <= len(batches) <= num_batches, f"{len(batches)=} {num_batches=}"
    loss_of = loss_function or whole_loss
    total = torch.zeros(2, dtype=torch.float64, device=next(model.buffers()).device)  # parameters may be offloaded
    pairs = _filled_up([split_rows(rows, share) for rows in batches], num_batches)

    def score(forward: Callable[..., Tensor], index: int) -> Tensor:
        inputs, targets = pairs[index]
        loss = loss_of(forward, inputs, targets)
        total.add_(torch.stack([loss.double(), (targets != IGNORE_INDEX).sum().double()]))
        return loss

    if pipeline is not None:
        pipeline.run([inputs for inputs, _ in pairs], score)
    else:
        for index in range(num_batches):
            score(model, index)
    free_gathered(model)
    field = total.new_zeros(1) if certificate is None else certificate.field(number)
    total = torch.cat([total * _counts(tensor_group, pipeline), field])
    for group in groups:
        dist.all_reduce(total, group=group)
    loss_sum, num_tokens, certified = total.tolist()
    if certificate is not None:
        certificate.check(number, certified)
    return loss_sum, int(num_tokens)


def split_rows(rows: Tensor, share: Share = WHOLE) -> tuple[Tensor, Tensor]:
    """Inputs and targets [m, T] of rows [m, T+1]: each token predicts the next. An ignored token reads as 0.

    Of a `share` the targets alone: the model is given whole rows.
    """
    return rows[:, :-1].clamp(min=0), take_BP(rows[:, 1:], share)


def whole_loss(
    model: Callable[..., Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = sum_cross_entropy,
) -> Tensor:
    """The loss by way of all logits."""
    loss: Tensor = cross_entropy(model(inputs), targets)
    return loss


def chunked_loss(
    model: Callable[..., Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int,
    chunk_loss: ChunkLoss = loss_and_gradient,
) -> Tensor:
    """The loss by way of the logits of `chunk_tokens` tokens at a time."""
    head = partial(chunked_cross_entropy, targets_BT=targets, chunk_tokens=chunk_tokens, chunk_loss=chunk_loss)
    loss: Tensor = model(inputs, head)
    return loss


def build_loss(
    parallel: ParallelConfig, device: torch.device, tensor_group: dist.ProcessGroup | None = None
) -> LossFunction:
    """The loss for a model built so: compiled with it on a GPU, which then makes no float32 copy of the logits."""
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = sum_cross_entropy
    chunk_loss: ChunkLoss = loss_and_gradient
    chunk_tokens = parallel.loss_chunk_tokens
    if tensor_group is not None:
        chunk_loss = partial(loss_and_gradient_of_cut, rank=tensor_group.rank())
        chunk_tokens = chunk_tokens or sys.maxsize  # all logits at once are one chunk
    if compiles_loss(parallel, device):  # which happens when they are first called
        compiled = partial(torch.compile, backend=parallel.compile_backend)
        cross_entropy, chunk_loss = compiled(cross_entropy), compiled(chunk_loss)
    if chunk_tokens == 0:
        return partial(whole_loss, cross_entropy=cross_entropy)
    return partial(chunked_loss, chunk_tokens=chunk_tokens, chunk_loss=chunk_loss)


def compiles_loss(parallel: ParallelConfig, device: torch.device) -> bool:
    """On a CPU it takes longer than it saves."""
    return parallel.compile and device.type == "cuda"


def _filled_up(pairs: Sequence[tuple[Tensor, Tensor]], number: int) -> list[tuple[Tensor, Tensor]]:
    """So many pairs of inputs and targets: for those that are missing the last one, with every target ignored."""
    if number == len(pairs):
        return list(pairs)
    inputs, targets = pairs[-1]
    filling = (inputs, torch.full_like(targets, IGNORE_INDEX))
    return [*pairs, *[filling] * (number - len(pairs))]


def _counts(tensor_group: dist.ProcessGroup | None, pipeline: Pipeline | None = None) -> bool:
    """Whether what this rank computes counts: once for all that have the same tokens, where the loss is."""
    return (tensor_group is None or tensor_group.rank() == 0) and (pipeline is None or pipeline.has_output)
