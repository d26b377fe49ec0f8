"""Submit a run to a cluster: `python -m jobs.submit +cluster=NAME [+site=NAME] [submit.action=ACTION] [key=value ...]`.

`submit.action` is render (the default: manifests on stdout), diff, apply, logs, status or stop; `--help` lists all.
"""

import sys

from regrow.config.schema import SubmitJobConfig
from regrow.config.store import given_files, given_overrides, run_job


def main(config: SubmitJobConfig) -> None:
    from regrow.submit.submit import submit

    sys.exit(submit(config, given_overrides(), given_files()))


if __name__ == "__main__":
    run_job(main, name="submit", schema=SubmitJobConfig)
