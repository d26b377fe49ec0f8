"""Validation: this rank's share of the first rows of the validation splits, the same rows whatever the world size."""

from functools import cached_property

import torch

from regrow.config.schema import PretrainConfig
from regrow.data.read.batch import layout_of
from regrow.data.read.corpora import Corpora
from regrow.data.read.outage import Patience, PatientReader
from regrow.model.loss import IGNORE_INDEX
from regrow.parallel.stream import Stream
from regrow.train.step import TrainStep, evaluate


class Validation:
    """Rows on the device, read once they are scored, and how they are scored."""

    def __init__(
        self,
        config: PretrainConfig,
        corpora: Corpora,
        *,
        device: torch.device,
        unit: int,
        num_units: int,
        patience: Patience,
    ) -> None:
        reader = corpora.reader("validation")
        rows = reader.first_rows(config.train.validation_seqs)
        self._size, self._seq_len, self._device = layout_of(config).slice_seqs, config.data.seq_len, device
        batches = [rows[start : start + self._size] for start in range(0, len(rows), self._size)]
        self.num_batches = -(-len(batches) // num_units)
        self._row_ids = batches[unit::num_units]
        self._reader = PatientReader(reader, patience)

    @cached_property
    def batches(self) -> list[torch.Tensor]:
        """Token ids, int64 [slice_seqs, T+1] each. Of one shape, which compiles once: what rows do not fill is ignored
        by the loss, and a rank without any rows has one batch of that."""
        read = [self._reader.read(row_ids).astype("int64") for row_ids in self._row_ids]
        full = torch.full((len(read) or 1, self._size, self._seq_len + 1), IGNORE_INDEX)
        for batch, tokens in zip(full, read, strict=False):
            batch[: len(tokens)] = torch.from_numpy(tokens)
        return list(full.to(self._device))

    def loss(self, step: TrainStep, stream: Stream, number: int) -> float:
        """The mean over all rows after step `number`. Collective."""
        batches = self.batches

        def score() -> tuple[float, int]:
            return evaluate(
                step.model,
                batches,
                num_batches=self.num_batches,
                groups=step.groups,
                tensor_group=step.tensor_group,
                pipeline=step.pipeline,
                share=step.share,
                loss_function=step.loss_function,
                certificate=step.certificate,
                number=number,
            )

        loss_sum, num_tokens = stream.submit(score).result()
        return loss_sum / max(num_tokens, 1)
