"""The one timer, on a clock that is told the time."""

from analysis.timing import compare, in_turns


def test_calls_take_turns_and_every_other_round_is_reversed():
    calls = []

    def clock(call, repeats):
        call()
        calls.append(repeats)
        return float(len(calls))

    order = []
    seconds = in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, repeats=5, clock=clock)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert set(calls) == {5}
    assert seconds == {"a": [3, 6, 7], "b": [4, 5, 8]}


def test_short_calls_are_repeated_until_the_clock_can_see_them():
    def clock(call, repeats):
        repeated.append(repeats)
        return 0.001

    repeated = []
    in_turns({"a": int}, 2, clock=clock)
    assert repeated == [1, 1, 4, 4]


def test_a_race_is_of_ratios_to_the_baseline_and_knows_its_own_stray():
    run = compare("title", ("base", lambda: sum(range(3000))), {"twice": lambda: sum(range(6000))}, rounds=9)
    assert [row["contestant"] for row in run.rows] == ["base", "twice", "base again"]
    assert run.rows[0]["ratio"] == 1
    assert run.rows[1]["ratio"] > 1.2
    assert run.trusted == (max(abs(run.rows[2]["ratio"] - 1), run.rows[2]["stray"]) <= 0.1)
