"""What can go wrong for a user: every class here ends a command in one clear line, never in a traceback.

A bug of ours is an `assert` or a plain exception instead. Messages say what, the numbers, and the fix.
"""


class RegrowError(Exception):
    """Base of all errors a user can mend."""


class ConfigError(RegrowError):
    """A setting is wrong, or two settings contradict each other."""


class BatchError(ConfigError):
    """The global batch cannot be divided over a world size."""


class ClusterError(RegrowError):
    """The cluster asked for is not there, or cannot hold the job."""


class JobNotThereError(ClusterError):
    """A job of a cluster is not, or no longer, there."""


class DataError(RegrowError):
    """A corpus, tokenizer, shard or manifest is missing, damaged or does not fit the job."""


class UnseenError(DataError):
    """A source or tokenizer that cannot be reached from this machine, and perhaps from others."""


class UnavailableError(DataError):
    """Storage fails to give rows that it holds; it may give them later."""


class CheckpointError(RegrowError):
    """A checkpoint is damaged, incomplete, or belongs to another run."""


class ForeignCheckpointError(CheckpointError):
    """A checkpoint is another run's, or of a version that this code does not read: no damage, and not to be passed over
    or deleted."""


class NotWrittenError(CheckpointError):
    """Storage does not take a checkpoint; its state is still there, and it may take it later."""


class ResumeError(RegrowError):
    """A run exists under this name and cannot be continued as asked."""


class EvaluationError(RegrowError):
    """A model cannot be evaluated as asked."""


class GroupOver(Exception):
    """What a rank waited for, or read, its group needs no more: that is over. No error of anything."""


def first_line(error: BaseException) -> str:
    """What a library's error says, short enough to stand in one of ours."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
