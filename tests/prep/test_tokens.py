"""Windows of held-out text, cut from token ids. No tokenizer is needed."""

import pytest

from qserve.prep.tokens_worker import cut_windows

BOS, EOS = 1, 2
LONG, SHORT = list(range(10, 30)), [[31, 32, 33], [41, 42, 43], [51, 52, 53]]


def test_every_window_begins_with_bos_whatever_it_is_cut_from() -> None:
    windows = cut_windows(iter([SHORT[0], LONG, *SHORT[1:]]), BOS, EOS, {"windows": 3, "tokens": 6})
    assert windows == [[1, 10, 11, 12, 13, 14], [1, 31, 32, 33, 2, 41], [1, 42, 43, 2, 51, 52]]


def test_no_bos_where_the_tokenizer_puts_none() -> None:
    windows = cut_windows(iter([SHORT[0], LONG, *SHORT[1:]]), None, EOS, {"windows": 3, "tokens": 6})
    assert windows == [[10, 11, 12, 13, 14, 15], [31, 32, 33, 2, 41, 42], [43, 2, 51, 52, 53, 2]]


@pytest.mark.parametrize(("record", "found"), [([5, 6, 7], 1), ([5, 6], 0)])
def test_a_record_that_just_fills_a_window(record: list[int], found: int) -> None:
    assert cut_windows(iter([record]), BOS, None, {"windows": 2, "tokens": 4}) == [[1, 5, 6, 7]][:found]


def test_no_more_windows_than_asked_for() -> None:
    assert cut_windows(iter([LONG] * 5), BOS, EOS, {"windows": 2, "tokens": 4}) == [[1, 10, 11, 12]] * 2
