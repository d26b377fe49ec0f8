"""The learning rate as a pure function of the tokens seen, so that it never depends on the world size or a restart."""

import math

from regrow.config.schema import OptimConfig, Schedule


def lr_at(tokens_seen: int, *, total_tokens: int, config: OptimConfig) -> float:
    """Learning rate of the step that brings the run to `tokens_seen` of its `total_tokens`, its own batch counted.

    wsd: linear warmup over `warmup_fraction`, stable, linear decay over `decay_fraction` to `min_lr_ratio`
    (arXiv:2404.06395). cosine: the same warmup, then half a cosine to `min_lr_ratio`. Counting the step's own tokens
    makes the first rate positive and the last one exactly the minimum.

    >>> config = OptimConfig(lr=1.0, min_lr_ratio=0.0, warmup_fraction=0.1, decay_fraction=0.5)
    >>> [round(lr_at(t, total_tokens=100, config=config), 3) for t in (5, 10, 49, 75, 100)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    warmup = config.warmup_fraction * total_tokens
    if tokens_seen < warmup:
        return config.lr * tokens_seen / warmup
    if config.schedule is Schedule.wsd:
        decay = config.decay_fraction * total_tokens
        left = (total_tokens - tokens_seen) / decay if decay else 1.0
    else:
        progress = (tokens_seen - warmup) / (total_tokens - warmup) if total_tokens > warmup else 1.0
        left = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    left = min(max(left, 0.0), 1.0)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)
