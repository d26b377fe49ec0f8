"""Where a restored state says that it stands is checked: the cursor is a function of the step."""

import pytest

from regrow.errors import CheckpointError
from regrow.state.entries import Progress, restored_progress


def test_a_state_whose_cursor_is_not_that_of_its_step_is_refused() -> None:
    kept = Progress(step=7, cursor=84, tokens_seen=5).to_dict()
    assert restored_progress(kept, global_batch_seqs=12) == Progress(7, 84, 5)
    with pytest.raises(CheckpointError, match=r"cursor 84 at step 7; with optim\.global_batch_seqs=16 it would be 112"):
        restored_progress(kept, global_batch_seqs=16)
    with pytest.raises(CheckpointError, match="cursor 85 at step 7"):
        restored_progress(kept | {"cursor": 85}, global_batch_seqs=12)
