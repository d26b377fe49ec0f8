"""See whether training keeps its promises: `python -m jobs.drill +drill=PLAN [key=value ...]`; `--help` lists all."""

import sys

from regrow.config.schema import DrillJobConfig
from regrow.config.store import run_job


def main(config: DrillJobConfig) -> None:
    from regrow.drill.run import run_drill  # ray, only when there is something to run

    sys.exit(0 if run_drill(config) else 1)


if __name__ == "__main__":
    run_job(main, name="drill", schema=DrillJobConfig)
