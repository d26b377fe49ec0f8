"""Llama 3 (arXiv:2407.21783) as one plain module: GQA, RoPE, SwiGLU, RMSNorm, tied or untied output.

Shape suffixes: B sequences, T tokens, V vocabulary, D model width, H query heads, K key and value heads, Q head width,
F feed-forward width. `q_BHTQ` has those dims in that order. `cos_BTQ` and `sin_BTQ` have a B of 1 where all rows count
positions alike.

RoPE follows Hugging Face's convention: a head's first half is rotated against its second half, so that exporting to
`LlamaForCausalLM` is a pure renaming. Meta's original weights interleave the pairs instead.
"""

import hashlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend

from regrow.config.schema import ModelConfig, RopeScaling
from regrow.model.attention import Mask, attend, document_starts_BT, mask_of, take_BP
from regrow.plan.boxes import Box
from regrow.plan.mesh import Coordinates
from regrow.plan.pipeline import Stages
from regrow.plan.placement import placed
from regrow.plan.share import WHOLE, Share

INIT_STD = 0.02
TRUNCATE_AT = 3.0  # standard deviations
INIT_BLOCK_ELEMENTS = 2**18  # of a parameter are drawn from one seed

Gather = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # keys and values [B, P, K, Q] to [B, T, K, Q]
Head = Callable[[Tensor, Tensor], Tensor]  # of the last norm's output [B, T, D] and the output weights [V, D]


def rope_frequencies_Q2(*, head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a token that each of the Q/2 pairs turns by, float32.

    `scaling` is Llama 3.1's: wavelengths beyond the original context are stretched by `factor`, short ones stay, those
    between are blended. Source: `apply_scaling` in meta-llama/llama-models.

    >>> rope_frequencies_Q2(head_dim=4, theta=100.0, scaling=None)
    tensor([1.0000, 0.1000])
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_seq_len * frequencies / (2 * math.pi)  # within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def rotate(x_BTHQ: Tensor, cos_BTQ: Tensor, sin_BTQ: Tensor) -> Tensor:
    """Turn each pair (i, i + Q/2) of every head by its position's angle; computed in float32, returned in x's dtype."""
    x = x_BTHQ.float()
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return (x * cos_BTQ.unsqueeze(-2) + swapped * sin_BTQ.unsqueeze(-2)).to(x_BTHQ.dtype)


class Attention(nn.Module):
    """Causal self-attention in which `num_heads / num_kv_heads` query heads share each key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.kernels: tuple[SDPBackend, ...] = ()
        self.gather: Gather | None = None  # where ranks share the tokens of a row
        self.wq = nn.Linear(config.dim, config.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_BTQ: Tensor, sin_BTQ: Tensor, mask: Mask | None) -> Tensor:
        q_BTHQ, k_BTKQ, v_BTKQ = (
            linear(x_BTD).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv)
        )
        q_BTHQ, k_BTKQ = rotate(q_BTHQ, cos_BTQ, sin_BTQ), rotate(k_BTKQ, cos_BTQ, sin_BTQ)
        if self.gather is not None:
            k_BTKQ, v_BTKQ = self.gather(k_BTKQ, v_BTKQ)
        out_BHTQ = attend(q_BTHQ.transpose(1, 2), k_BTKQ.transpose(1, 2), v_BTKQ.transpose(1, 2), mask, self.kernels)
        return self.wo(out_BHTQ.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)  # gate
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)  # up
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)  # down

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(nn.Module):
    """One decoder layer: attention, then feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x_BTD: Tensor, cos_BTQ: Tensor, sin_BTQ: Tensor, mask: Mask | None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_BTQ, sin_BTQ, mask)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Output(nn.Linear):
    """The output weights. What is to be made of them comes as an argument, so that FSDP's hooks run around it."""

    def forward(self, x_BTD: Tensor, head: Head) -> Tensor:  # type: ignore[override]
        return head(x_BTD, self.weight)


class Llama(nn.Module):
    """Tokens to logits. Build it under `torch.device("meta")`, then `to_empty` and `init_weights`.

    `eot_id`, the end-of-text token, is given exactly if `config.document_attention` is set. As rank `pp_rank` of a
    pipeline it has the blocks of that rank's `stages`, the embedding on the first rank, the output on the last (tied, a
    copy of the embedding), all under the names that they have in the whole model; `stages` are what runs then.
    """

    rope_Q2: Tensor
    stages: dict[int, "Stage"]  # by number; none: it runs as a whole

    def __init__(
        self, config: ModelConfig, eot_id: int | None = None, stages: Stages | None = None, pp_rank: int = 0
    ) -> None:
        super().__init__()
        assert config.document_attention == (eot_id is not None), f"{config.document_attention=} {eot_id=}"
        self.config = config
        self.eot_id = eot_id
        self.share = WHOLE  # of the tokens of rows: what runs is given whole ones, and computes this
        is_first = stages is None or pp_rank == 0
        is_last = stages is None or pp_rank == stages.pp - 1
        blocks = {number: stages.blocks[number] for number in stages.of_rank(pp_rank)} if stages else {}
        has_embedding = is_first or (is_last and config.tied)
        self.embed = nn.Embedding(config.vocab_size, config.dim) if has_embedding else None
        self.layers = nn.ModuleList()
        for number in sorted(block for each in blocks.values() for block in each) or range(config.num_layers):
            self.layers.add_module(str(number), Block(config))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if is_last else None
        has_output = is_last and not config.tied
        self.output = Output(config.dim, config.vocab_size, bias=False) if has_output else None
        self.register_buffer("rope_Q2", self.rope_frequencies_Q2(), persistent=False)
        self.stages = {
            number: Stage(self, each, is_first=number == 0, is_last=number == stages.last if stages else True)
            for number, each in blocks.items()
        }
        self.boxes = {name: Box.whole(name, tuple(each.shape)) for name, each in self.named_parameters()}

    def place(self, at: Coordinates) -> None:
        """Note in `boxes` what this rank is to hold of each parameter; tensor parallelism asks the same table."""
        self.boxes = {name: placed(box, at) for name, box in self.boxes.items()}

    def share_rows(self, share: Share, gather: Gather) -> None:
        """Compute this share of each row's tokens, for which `gather` brings keys and values of the others."""
        self.share = share
        for module in self.modules():
            if isinstance(module, Attention):
                module.gather = gather

    def use_attention_kernels(self, kernels: tuple[SDPBackend, ...]) -> None:
        """For attention over whole rows, the first that can; none leaves the choice to torch."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.kernels = kernels

    def rope_frequencies_Q2(self) -> Tensor:
        config = self.config
        return rope_frequencies_Q2(
            head_dim=config.dim // config.num_heads, theta=config.rope_theta, scaling=config.rope_scaling
        )

    def rope_BTQ(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position's angles, float32, each frequency twice."""
        angles_BTQ = (positions_BT[..., None] * self.rope_Q2).repeat(1, 1, 2)
        return angles_BTQ.cos(), angles_BTQ.sin()

    def forward(self, tokens_BT: Tensor, head: Head = F.linear) -> Tensor:
        """Logits [B, T, V] in the compute dtype; token t sees tokens 0..t, or those of its document among them.

        Where ranks share rows, [B, P, V] of this rank's tokens. Or what another `head` makes of the last norm's output
        and the output weights, as a loss without all logits.

        Within documents, positions count from each one's beginning. RoPE's scores depend on differences of positions
        only, so this changes their range and rounding, not what is computed: it is the mask that separates documents.
        """
        assert not self.stages, "a part runs by its stages"
        assert self.embed is not None
        assert self.norm is not None
        places = self.places(tokens_BT)
        x_BTD = self.embed(self.tokens(tokens_BT))
        for layer in self.layers:
            x_BTD = layer(x_BTD, *places)
        x_BTD = self.norm(x_BTD)
        return head(x_BTD, self.embed.weight) if self.output is None else self.output(x_BTD, head)

    def tokens(self, tokens_BT: Tensor) -> Tensor:
        """This rank's [B, P]."""
        return take_BP(tokens_BT, self.share)

    def places(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor, Mask | None]:
        """What blocks are told of where the tokens stand: cosines and sines of positions, and attention's mask."""
        length = tokens_BT.size(1)
        positions_BP = at_BP = take_BP(torch.arange(length, device=tokens_BT.device)[None], self.share)
        if self.eot_id is not None:
            starts_BP = take_BP(document_starts_BT(tokens_BT, self.eot_id), self.share)
            positions_BP = at_BP - starts_BP
        elif self.share != WHOLE:
            starts_BP = torch.zeros_like(at_BP)
        else:
            return *self.rope_BTQ(positions_BP), None
        return *self.rope_BTQ(positions_BP), mask_of(starts_BP, at_BP[0], length)


class Stage(nn.Module):
    """Neighbouring blocks of a model that has them, with the embedding before the first and the output behind the last.

    The modules stay the model's: this is what runs, and what FSDP takes for a root.
    """

    def __init__(self, model: Llama, blocks: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        layers = dict(model.layers.named_children())
        self.is_first, self.places, self.tokens = is_first, model.places, model.tokens
        self.embed = model.embed if is_first or (is_last and model.config.tied) else None
        self.layers = nn.ModuleList(layers[str(block)] for block in blocks)
        self.norm, self.output = (model.norm, model.output) if is_last else (None, None)

    def forward(self, x_BTD: Tensor | None, tokens_BT: Tensor, head: Head = F.linear) -> Tensor:
        """The residual stream behind its last block; of the last stage, what `head` makes of it, as in `Llama`.

        `x_BTD` is what the stage before it returned, `tokens_BT` the same for all stages.
        """
        places = self.places(tokens_BT)
        if self.is_first and self.embed is not None:
            x_BTD = self.embed(self.tokens(tokens_BT))
        assert x_BTD is not None, "only the first stage begins with tokens"
        for layer in self.layers:
            x_BTD = layer(x_BTD, *places)
        if self.norm is None:
            return x_BTD
        x_BTD = self.norm(x_BTD)
        if self.output is not None:
            return self.output(x_BTD, head)
        assert self.embed is not None
        return head(x_BTD, self.embed.weight)


@torch.no_grad()
def init_buffers(model: Llama) -> None:
    """Fill what is neither trained nor loaded."""
    model.rope_Q2.copy_(model.rope_frequencies_Q2())


def init_weights(model: Llama, seed: int) -> None:
    """Fill every parameter and buffer; bitwise the same for every world size and layout, and on every kind of GPU.

    A parameter is cut into blocks of rows, a function of its global shape alone, and each block is drawn from a seed
    made of (seed, parameter, block). A rank draws the blocks that its shard overlaps, so no rank ever holds a whole
    parameter. Local: no communication.

    Standard deviations follow torchtitan's Llama 3: 1 for an untied embedding, INIT_STD for matrices, divided by
    sqrt(2 * (layer + 1)) for those that write to the residual stream, 1/sqrt(D) for the output projection; norms are
    1. Here the output's never exceeds INIT_STD, so that small models too start near a loss of log(V), w3's is not
    divided, as torchtitan's is, and all normals are cut at TRUNCATE_AT deviations.
    """
    init_buffers(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local, box = parameter.detach(), model.boxes[name]
            local = local.to_local() if isinstance(local, DTensor) else local
            assert tuple(local.shape) == box.sizes, f"{name}: holds {tuple(local.shape)}, its place is {box}"
            if len(box.shape) == 1:
                local.fill_(1.0)
                continue
            std, (rows, columns) = _init_std(name, model.config), box.slices
            num_rows = max(1, INIT_BLOCK_ELEMENTS // box.shape[1])  # of a block
            for first in range(rows.start // num_rows * num_rows, rows.stop if box.num_elements else 0, num_rows):
                last = min(first + num_rows, box.shape[0])
                values = truncated_normal((last - first, box.shape[1]), std, f"{seed}:{name}:{first}", local.device)
                begin, end = max(first, rows.start), min(last, rows.stop)
                local[begin - rows.start : end - rows.start].copy_(values[begin - first : end - first, columns])


def _init_std(name: str, config: ModelConfig) -> float:
    module = name.removesuffix(".weight")
    if module == "output" or (module == "embed" and config.tied):
        return min(INIT_STD, config.dim**-0.5)
    if module == "embed":
        return 1.0
    if module.endswith((".wo", ".w2")):
        layer = int(name.split(".")[1])
        return INIT_STD / math.sqrt(2 * (layer + 1))
    return INIT_STD


def truncated_normal(shape: tuple[int, ...], std: float, seed: str, device: torch.device) -> Tensor:
    """Normal values within TRUNCATE_AT standard deviations, as float32, by the inverse of the distribution function.

    Drawn on the host: what CUDA draws depends on how many multiprocessors a GPU has, and replicas on GPUs of two kinds
    would start apart. Computed in float64, where the last bit of `erfinv`, which vectorised loops and their tails need
    not agree on, is rounded away.
    """
    digest = hashlib.sha256(seed.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    edge = math.erf(TRUNCATE_AT / math.sqrt(2))
    uniform = torch.empty(shape, dtype=torch.float64).uniform_(-edge, edge, generator=generator)
    return uniform.to(device).erfinv_().mul_(std * math.sqrt(2)).float()
