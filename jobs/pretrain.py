"""Pretrain a Llama: `python -m jobs.pretrain [+cluster=NAME] [model=NAME] [key=value ...]`; `--help` lists all."""

from regrow.config.schema import PretrainConfig
from regrow.config.store import run_job
from regrow.runtime.interrupts import terminable


@terminable()  # until there is a run, which takes SIGTERM to stop in good order
def main(config: PretrainConfig) -> None:
    from regrow.forecast.settle import settled

    config, _ = settled(config)
    from regrow.runtime.driver import pretrain  # ray and torch, only when there is something to run

    pretrain(config)


if __name__ == "__main__":
    run_job(main, name="pretrain")
