"""Llama written a second time, as plainly as possible and in float64, to check the model against.

Shares no code with `regrow.model`: loops over heads and positions, attention by hand, angles by `math`.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from regrow.config.schema import ModelConfig, RopeScaling


def reference_loss(config: ModelConfig, weights: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """Mean cross-entropy of every row's tokens after the first; `rows` int64 [B, T+1]."""
    losses = []
    for row in rows:
        logits = reference_logits(config, weights, row[:-1])
        picked = logits[torch.arange(len(row) - 1), row[1:]]
        losses.append(torch.logsumexp(logits, dim=-1) - picked)
    return torch.cat(losses).mean()


def assert_gradients(
    config: ModelConfig, weights: Mapping[str, Tensor], rows: Tensor, loss: float, grads: Mapping[str, Tensor]
) -> None:
    """The loss of these weights on these rows, and every parameter's gradient, are right to 1e-5."""
    exact = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    want = reference_loss(config, exact, rows)
    want.backward()
    assert math.isclose(loss, want.item(), rel_tol=1e-6), f"loss {loss}, expected {want.item()}"
    assert grads.keys() == exact.keys()
    for name, weight in exact.items():
        assert weight.grad is not None
        error = (grads[name].double() - weight.grad).norm() / weight.grad.norm()
        assert error <= 1e-5, f"{name}: {error:.1e}"


def reference_logits(config: ModelConfig, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [T, V] of one sequence of tokens [T], float64."""
    head_dim, group = config.dim // config.num_heads, config.num_heads // config.num_kv_heads
    frequencies = [
        reference_frequency(config.rope_theta ** (-2 * i / head_dim), config.rope_scaling) for i in range(head_dim // 2)
    ]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name]

    x = weights["embed.weight"][tokens]
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        h = norm(x, f"{prefix}.attention_norm.weight")
        q, k, v = (h @ weights[f"{prefix}.attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
        heads = []
        for head in range(config.num_heads):
            mine = slice(head * head_dim, (head + 1) * head_dim)
            shared = slice(head // group * head_dim, (head // group + 1) * head_dim)
            scores = _turn(q[:, mine], frequencies) @ _turn(k[:, shared], frequencies).T / math.sqrt(head_dim)
            visible = torch.ones_like(scores, dtype=torch.bool).tril()
            heads.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[:, shared])
        x = x + torch.cat(heads, dim=-1) @ weights[f"{prefix}.attention.wo.weight"].T
        h = norm(x, f"{prefix}.ffn_norm.weight")
        gate, up = (h @ weights[f"{prefix}.ffn.{name}.weight"].T for name in ("w1", "w3"))
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{prefix}.ffn.w2.weight"].T
    output = weights["embed.weight"] if config.tied else weights["output.weight"]
    return norm(x, "norm.weight") @ output.T


def reference_frequency(frequency: float, scaling: RopeScaling | None) -> float:
    """Llama 3.1's scaling of one RoPE frequency, case by case."""
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_seq_len / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_seq_len / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _turn(x: Tensor, frequencies: list[float]) -> Tensor:
    """Rotate (x[i], x[i + Q/2]) of every position by position times frequency."""
    half = len(frequencies)
    rows = []
    for position, row in enumerate(x):
        angles = torch.tensor([position * frequency for frequency in frequencies], dtype=x.dtype)
        first, second = row[:half], row[half:]
        cos, sin = angles.cos(), angles.sin()
        rows.append(torch.cat((first * cos - second * sin, second * cos + first * sin)))
    return torch.stack(rows)
