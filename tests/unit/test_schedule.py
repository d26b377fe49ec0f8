import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.config.schema import OptimConfig, Schedule
from regrow.optim.schedule import lr_at

TOTAL = 1_000_000


def config(schedule: Schedule = Schedule.wsd, **changes: float) -> OptimConfig:
    return OptimConfig(lr=2.0, min_lr_ratio=0.1, schedule=schedule, **changes)  # type: ignore[arg-type]


def test_wsd_warms_up_stays_and_decays_linearly_to_the_minimum():
    at = {share: lr_at(int(share * TOTAL), total_tokens=TOTAL, config=config()) for share in (0.05, 0.1, 0.7, 0.85, 1)}
    assert at == pytest.approx({0.05: 1.0, 0.1: 2.0, 0.7: 2.0, 0.85: 1.1, 1: 0.2})


def test_cosine_goes_from_the_peak_through_the_middle_to_the_minimum():
    cosine = config(Schedule.cosine)
    at = [lr_at(int(share * TOTAL), total_tokens=TOTAL, config=cosine) for share in (0.05, 0.1, 0.55, 1)]
    assert at == pytest.approx([1.0, 2.0, 1.1, 0.2])


@given(
    schedule=st.sampled_from(Schedule),
    warmup=st.floats(0, 0.5),
    decay=st.floats(0, 0.5),
    seen=st.lists(st.integers(1, 2 * TOTAL), min_size=2, max_size=20),
)
def test_the_rate_is_positive_bounded_and_never_rises_after_warmup(schedule, warmup, decay, seen):
    optim = config(schedule, warmup_fraction=warmup, decay_fraction=decay)
    rates = [lr_at(tokens, total_tokens=TOTAL, config=optim) for tokens in sorted(seen) if tokens >= warmup * TOTAL]
    assert all(0.2 * (1 - 1e-9) <= rate <= 2.0 * (1 + 1e-9) for rate in rates)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(rates))
    assert 0 < lr_at(min(seen), total_tokens=TOTAL, config=optim) <= 2.0


@pytest.mark.parametrize("schedule", Schedule)
def test_the_last_step_of_a_run_has_exactly_the_minimum(schedule):
    assert math.isclose(lr_at(TOTAL, total_tokens=TOTAL, config=config(schedule)), 0.2)


def test_without_warmup_or_decay_the_rate_is_constant():
    flat = config(warmup_fraction=0.0, decay_fraction=0.0)
    assert {lr_at(tokens, total_tokens=TOTAL, config=flat) for tokens in (1, TOTAL // 2, TOTAL)} == {2.0}
