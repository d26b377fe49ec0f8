"""Runs for tests, as a job opens them that holds their lock."""

from regrow.config.schema import PretrainConfig
from regrow.runtime.run_folder import Run, find_or_create, write_config


def open_run(config: PretrainConfig, *, manifest_sha256: str) -> Run:
    """Create the run's folder, or open it to go on. Raises as `find_or_create`."""
    run = find_or_create(config, manifest_sha256=manifest_sha256)
    write_config(run, config)
    return run
