"""A Llama in plain torch, as anyone would write it: what benchmarks compare ours with."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regrow.config.schema import ModelConfig


class BareBlock(nn.Module):
    """A Llama block in plain torch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.dim // config.num_heads
        kv_dim = config.num_kv_heads * self.width
        self.norm1, self.norm2 = (nn.RMSNorm(config.dim, eps=config.norm_eps) for _ in range(2))
        self.q, self.o = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(config.dim, kv_dim, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(config.dim, config.ffn_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.width)).transpose(1, 2)

        def turn(y: Tensor) -> Tensor:
            a, b = y.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(y.dtype)

        h = self.norm1(x)
        q, k, v = turn(heads(self.q(h))), turn(heads(self.k(h))), heads(self.v(h))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class BareLlama(nn.Module):
    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(BareBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        width = config.dim // config.num_heads
        angles = torch.outer(torch.arange(seq_len).float(), config.rope_theta ** -(torch.arange(0, width, 2) / width))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))
