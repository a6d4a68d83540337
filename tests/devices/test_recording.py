"""Recordings of what runs on a device, whose backward pass has a thread of its own."""

import threading

from roundoff.record.source_lines import prepares_gradients, user_line


def test_the_engines_thread_has_no_frames_above_the_recorder():
    answers: list[object] = []

    def asks():
        answers.append(user_line(40, in_engine=True))
        answers.append(user_line(40))
        answers.append(prepares_gradients(40))

    thread = threading.Thread(target=asks)
    thread.start()
    thread.join()
    assert answers == [None, None, False]
