"""How contenders are timed: in turns, each first once, short ones more often."""

from __future__ import annotations

from ring_flash_attn.bench.timing import WARM_UP, Stopwatch, Timing, interleaved


class _Told(Stopwatch):
    """Says that works take what they return."""

    def __init__(self, hosts=(0.5,)) -> None:
        self.leads: list[float] = []
        self._hosts = list(hosts)

    def time(self, work, host=1.0):
        self.leads.append(host)
        return Timing(work(), self._hosts.pop(0) if len(self._hosts) > 1 else self._hosts[0])


def _timed(rounds, **spans):
    ran = []

    def work(name):
        def run():
            ran.append(name)
            left = spans[name]
            return left.pop(0) if len(left) > 1 else left[0]

        return run

    watch = _Told()
    found = interleaved({name: work(name) for name in spans}, watch, rounds, lambda line: None)
    return found, ran[len(spans) * (WARM_UP + 1) :], watch


def test_each_round_begins_with_another_one() -> None:
    _, ran, _ = _timed(4, a=[1.0], b=[1.0], c=[1.0])
    assert "".join(ran) == "abc" + "bca" + "cab" + "abc"


def test_short_works_run_more_often() -> None:
    """As many times as fit into the longest one, and eight at most."""
    _, ran, _ = _timed(2, long=[30.0], middle=[9.0], short=[0.1])
    assert [ran.count(name) for name in ("long", "middle", "short")] == [2, 6, 16]


def test_far_slower_works_sit_rounds_out() -> None:
    """Until their runs take a second in all, but not below five rounds; others never do."""
    spans = {"a": [10.0], "b": [10.0], "c": [10.0], "long": [40.0]}
    spans |= {"slow": [120.0], "slowest": [9000.0]}
    _, ran, _ = _timed(30, **spans)
    assert [ran.count(name) for name in spans] == [120, 120, 120, 30, 8, 5]
    _, ran, _ = _timed(30, slow=[9000.0], slowest=[9500.0])
    assert [ran.count(name) for name in ("slow", "slowest")] == [30, 30]


def test_medians_over_all_runs() -> None:
    """One disturbed run, or one bad round, moves nothing; nor do the runs that warm up."""
    warm = [100.0] * WARM_UP
    runs = [2.0, 2.0, 9.0, 9.0, 9.0, 2.0, 2.0, 2.0, 2.0]
    found, _, watch = _timed(3, long=[*warm, 6.0], short=[*warm, *runs[:1], *runs])
    assert found["short"].median.device == 2.0
    assert found["long"].median.device == 6.0
    assert set(watch.leads[2:]) == {0.5}, "the lead is as long as the host needed"


def test_the_lead_grows_with_the_host_but_not_with_every_hiccup() -> None:
    """A run that waits for the host says nothing about the device."""
    watch = _Told([0.5, 0.4, 0.9, 0.6, 70.0, 0.6])
    interleaved({"a": lambda: 1.0}, watch, 6, lambda line: None)
    assert watch.leads[1:] == [0.5, 0.5, 0.9, 0.9, 2.0, 2.0]
