import time

from hypothesis import given, settings
from hypothesis import strategies as st

from raycore.text.stop_strings import StopStrings


@settings(max_examples=60)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_stop_strings_are_found_in_any_split_of_a_text(text, stops, data):
    """However the text is cut into pieces, what is shown never has to be taken back."""
    checker = StopStrings(stops)
    shown, searched, match = "", 0, None
    while searched < len(text) and match is None:
        length = data.draw(st.integers(searched + 1, len(text)))
        match = checker.find(text[searched:length])
        searched = length
        if match is None:
            beginnings = [stop[:size] for stop in stops for size in range(len(stop))]
            assert checker.num_held_back == max(len(each) for each in beginnings if text[:length].endswith(each))
        else:
            assert match.start == min(text.index(stop) for stop in stops if stop in text[:length])
            assert text.startswith(match.stop, match.start)
        visible = text[: match.start] if match else text[: length - checker.num_held_back]
        assert visible.startswith(shown)
        shown = visible
    assert (match is not None) == any(stop in text for stop in stops)


def test_long_stop_strings_cost_no_more_than_short_ones():
    checker = StopStrings(["a" * 1000 + str(number) for number in range(16)])
    begun_s = time.thread_time()
    for piece in ["a"] * 2000 + [" the", " fox"] * 500:
        assert checker.find(piece) is None
    assert checker.num_held_back == 0
    assert time.thread_time() - begun_s < 2.0
