"""Validation: this rank's share of the first rows of the validation splits, the same rows whatever the world size."""

import torch

from regrow.config.schema import PretrainConfig
from regrow.data.read.corpora import Corpora
from regrow.model.loss import IGNORE_INDEX
from regrow.parallel.stream import Stream
from regrow.train.step import TrainStep, evaluate


class Validation:
    """Rows on the device, and how they are scored."""

    def __init__(
        self, config: PretrainConfig, corpora: Corpora, *, device: torch.device, unit: int, num_units: int
    ) -> None:
        reader = corpora.reader("validation")
        rows = reader.first_rows(config.train.validation_seqs)
        size = config.optim.global_batch_seqs // config.optim.num_slices
        starts = range(0, len(rows), size)
        self.num_batches = -(-len(starts) // num_units)
        read = [reader.read(rows[start : start + size]).astype("int64") for start in starts[unit::num_units]]
        # of one shape, which compiles once: the last one is filled up, and a rank without any has one of filling
        full = torch.full((len(read) or 1, size, config.data.seq_len + 1), IGNORE_INDEX)
        for batch, tokens in zip(full, read, strict=False):
            batch[: len(tokens)] = torch.from_numpy(tokens)
        self.batches = list(full.to(device))

    def loss(self, step: TrainStep, stream: Stream, number: int) -> float:
        """The mean over all rows after step `number`. Collective."""

        def score() -> tuple[float, int]:
            return evaluate(
                step.model,
                self.batches,
                num_batches=self.num_batches,
                group=step.group,
                tensor_group=step.tensor_group,
                loss_function=step.loss_function,
                certificate=step.certificate,
                number=number,
            )

        loss_sum, num_tokens = stream.submit(score).result()
        return loss_sum / max(num_tokens, 1)
