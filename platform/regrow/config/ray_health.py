"""How soon Ray takes a node for dead that says nothing."""

PERIOD_MS, TIMEOUT_MS = 1000, 2000
LEAST_S = 5.0  # two checks: one that fails may be a busy host


def health_checks(silence_s: float) -> dict[str, int]:
    """Ray's settings with which that takes about so many seconds.

    A check that fails takes its timeout, and the next one comes a period later (GcsHealthCheckManager).

    >>> health_checks(10.0)["health_check_failure_threshold"]
    3
    """
    return {
        "health_check_initial_delay_ms": round(silence_s * 1000),
        "health_check_period_ms": PERIOD_MS,
        "health_check_timeout_ms": TIMEOUT_MS,
        "health_check_failure_threshold": max(1, round(silence_s * 1000 / (PERIOD_MS + TIMEOUT_MS))),
    }
