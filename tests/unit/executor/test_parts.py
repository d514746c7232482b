"""Messages in parts."""

from hypothesis import given
from hypothesis import strategies as st

from raycore.rpc.transport import Joiner, split


@given(messages=st.lists(st.binary(max_size=40)), capacity=st.integers(1, 12))
def test_the_parts_of_a_message_are_joined_to_the_same_message(messages, capacity):
    joiner = Joiner(capacity)
    joined = []
    for message in messages:
        parts = split(message, capacity)
        assert all(len(part) <= capacity for part in parts)
        whole = [joiner.add(part) for part in parts]
        assert whole[:-1] == [None] * (len(parts) - 1)
        joined.append(whole[-1])
    assert joined == messages


def test_a_message_that_fits_is_not_copied():
    message = b"x" * 9
    assert split(message, 10)[0] is message
    assert Joiner(10).add(message) is message
