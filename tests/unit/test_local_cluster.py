"""A Ray that does not start is one clear line, whatever Ray raises."""

from pathlib import Path

import pytest

from regrow.config.schema import ClusterConfig
from regrow.errors import ClusterError
from regrow.runtime.cluster import cluster_for


@pytest.mark.parametrize("local_nodes", [0, 2])
def test_a_ray_that_does_not_start_is_one_line(
    local_nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("a-long-name-" * 8)  # longer than the names of sockets may be
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    config = ClusterConfig(address=None, local_nodes=local_nodes, dashboard=False)
    refused = pytest.raises(ClusterError, match=r"^Ray did not start on this machine: .*107 bytes")
    with refused as caught, cluster_for(config):
        pass
    assert "\n" not in str(caught.value)
    assert f"{folder}/ray/session_latest/logs" in str(caught.value)
