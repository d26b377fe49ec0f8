"""A look at the corpus from where a job is submitted, which may see less than the job will."""

from regrow.config.schema import PretrainConfig
from regrow.data.preflight import check_corpus
from regrow.errors import UnseenError

LOOK_S = 5.0  # for each place outside this machine; the job itself waits longer


def look_at_corpus(config: PretrainConfig) -> str:
    """Refuse a corpus that cannot do; a line on what cannot be seen from here, empty where all is well.

    Raises DataError as `check_corpus` does, but for what another machine may reach.
    """
    try:
        check_corpus(config, deadline_s=LOOK_S, footers=False)
    except UnseenError as error:
        return f"the corpus was not looked at, the job will: {error}"
    return ""
