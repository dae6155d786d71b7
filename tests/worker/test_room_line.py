"""Calls that found no memory are made again, one at a time and in an order that gives memory back first."""

from worker.io_thread.pool_calls import TRY_AGAIN_S, Place, RoomLine


class Line:
    """A line of calls that only begin; the test says when one is over, or found no room."""

    def __init__(self) -> None:
        self.now, self.begun, self.lost = 0.0, list[Place](), set[Place]()
        self.line = RoomLine(lambda: self.now)

    def begin(self, place: Place) -> None:
        self.line.begin(place, lambda: self.begun.append(place), lambda: place not in self.lost)

    def finds_no_room(self, place: Place) -> None:
        self.line.make_again(
            place, lambda: self.begun.append(place), lambda: place not in self.lost
        )

    def pass_time(self) -> list[Place]:
        """Return what begins after a pause."""
        self.now += TRY_AGAIN_S
        self.begun.clear()
        self.line.try_again()
        return list(self.begun)


FIRST, SECOND, THIRD, PART = Place(True, 1), Place(True, 2), Place(True, 3), Place(False, 2)


def test_shards_that_hold_what_the_other_waits_for_are_opened_one_after_the_other() -> None:
    line = Line()
    for place in (FIRST, SECOND):
        line.begin(place)
    assert line.begun == [FIRST, SECOND]
    for place in (SECOND, FIRST):
        line.finds_no_room(place)
    line.begin(THIRD)
    assert line.pass_time() == [FIRST]
    assert line.pass_time() == [], "while it is tried no other is"
    line.line.note_over(FIRST)
    assert line.pass_time() == [SECOND]
    line.line.note_over(SECOND)
    assert line.pass_time() == [THIRD]


def test_a_part_is_written_before_a_file_is_opened_that_waits_for_memory() -> None:
    line = Line()
    for place in (FIRST, PART):
        line.finds_no_room(place)
    assert line.pass_time() == [PART]


def test_a_job_that_was_withdrawn_while_it_waits_for_memory_leaves_the_line() -> None:
    line = Line()
    for place in (FIRST, SECOND):
        line.finds_no_room(place)
    line.lost.add(FIRST)
    assert line.pass_time() == [FIRST, SECOND], (
        "its call comes to its end at once, beside the first of the line"
    )
