"""position.py: the module that runs, and the numbers of calls."""

from __future__ import annotations

from roundoff.ops.position import Place, Position


def test_calls_are_numbered_by_module_and_operator():
    position = Position()
    position.enter("")
    position.enter("a")
    assert position.next_call("mul") == ("a", 0)
    assert position.next_call("mul") == ("a", 1)
    assert position.leave() == "a"
    assert position.next_call("mul") == ("", 0)
    position.leave()
    assert position.module == ""


def test_leaving_more_often_than_entering_is_harmless():
    position = Position()
    assert position.leave() == ""
    assert position.path == []


def test_numbers_go_on_until_begin():
    position = Position()
    for expected in (0, 1):
        position.enter("")
        assert position.next_call("mul") == ("", expected)
        position.leave()
    assert position.forwards == 2
    position.begin()
    assert position.next_call("mul") == ("", 0)
    assert position.forwards == 0


def test_numbers_start_again_after_each_period():
    position = Position(period=2)
    numbers = []
    for _ in range(4):
        position.enter("")
        numbers.append(position.next_call("mul")[1])
        position.leave()
    assert numbers == [0, 1, 0, 1]


def test_a_place_is_where_one_can_go_on():
    position = Position()
    position.enter("a")
    position.next_call("mul")
    place = position.place()
    position.next_call("mul")
    position.leave()
    position.go_to(place)
    assert position.module == "a"
    assert position.next_call("mul") == ("a", 1)
    position.go_to(Place())
    assert position.path == []
