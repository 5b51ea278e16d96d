"""When the tokens of a stream are sent together."""

from __future__ import annotations

import pytest
from plansmith.serving.send_budget import SendBudget, machine_share


def test_streams_share_the_time_that_sending_may_take() -> None:
    budget = SendBudget(share=0.05, most_s=0.25)
    assert budget.interval_s(100) == 0  # nothing is known yet: at once
    budget.sent(0.0002)
    assert budget.interval_s(1) == pytest.approx(0.004)
    assert budget.interval_s(10) == pytest.approx(0.04)
    assert budget.interval_s(1000) == 0.25  # nobody waits longer


def test_the_cost_follows_what_is_measured_and_one_slow_send_changes_little() -> None:
    budget = SendBudget(share=0.1, most_s=10)
    for _ in range(100):
        budget.sent(0.001)
    before = budget.interval_s(1)
    budget.sent(0.005)
    assert before < budget.interval_s(1) < 2 * before
    for _ in range(100):
        budget.sent(0.002)
    assert budget.interval_s(1) == pytest.approx(0.02, rel=0.01)


def test_more_cores_may_spend_more_on_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(2)))
    assert machine_share() == pytest.approx(0.03)
    budget = SendBudget()
    budget.sent(0.0003)
    assert budget.interval_s(16) == pytest.approx(0.16)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    assert machine_share() == 0.25
