"""regrow: pretrain Llama models on a Ray cluster whose size changes under the job."""

__version__ = "0.1.0"
