"""From the arguments of `jobs.submit` to those of `jobs.pretrain` on the cluster."""

from collections.abc import Sequence
from dataclasses import replace

from regrow.config.schema import SubmitJobConfig
from regrow.config.store import pretrain_overrides

OURS = ("submit", "site")  # groups that jobs.pretrain does not have
JOIN = "cluster.address=auto"


def pretrain_arguments(config: SubmitJobConfig, given: Sequence[str]) -> list[str]:
    """The user's own arguments, as they were given, and what else makes up the same run, on the cluster it runs in.

    A site may set what is the run's, as where it is stored: that is added as what differs without the site.
    """
    kept = [each for each in given if _key(each).split(".")[0] not in OURS and _key(each) not in _PLACE]
    cluster = replace(config.cluster, address="auto", local_nodes=0)
    return pretrain_overrides(replace(config, cluster=cluster), [*kept, JOIN])


_PLACE = ("cluster.address", "cluster.local_nodes")  # where the submitter would have run it


def _key(argument: str) -> str:
    return argument.lstrip("+~").partition("=")[0].partition("@")[0]
