import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotzero.errors import ConfigError
from slotzero.graph import Ladder, NoCaptureSize


@given(maximum=st.integers(1, 2000), n=st.integers(-3, 2100))
def test_pick_is_the_smallest_size_that_holds_n_or_a_reason(maximum, n):
    ladder = Ladder.up_to(maximum)
    picked = ladder.pick(n)
    if n < 1 or n > maximum:
        assert isinstance(picked, NoCaptureSize) and str(n) in picked.reason
    else:
        assert picked == min(size for size in ladder.sizes if size >= n)


@given(maximum=st.integers(1, 4096))
def test_any_maximum_is_a_size_and_padding_stays_bounded(maximum):
    ladder = Ladder.up_to(maximum)
    assert ladder.maximum == maximum
    assert all(ladder.pick(n) <= max(2 * n, n + 4) for n in range(1, maximum + 1))


@given(maximum=st.integers(1, 10000))
def test_doubling_never_doubles_the_work(maximum):
    ladder = Ladder.doubling(maximum)
    assert ladder.maximum == maximum
    assert all(ladder.pick(n) < 2 * n for n in range(1, maximum + 1))
    assert len(ladder.sizes) <= 2 * maximum.bit_length() + 1


@given(step=st.integers(1, 64), maximum=st.integers(1, 4096))
def test_multiples_waste_less_than_a_step(step, maximum):
    ladder = Ladder.multiples(step, maximum)
    assert all(ladder.pick(n) - n < step for n in range(1, maximum + 1))


@pytest.mark.parametrize("sizes", [(), (0,), (-1, 2), (2, 1), (1, 1)])
def test_a_ladder_that_does_not_ascend_is_refused(sizes):
    with pytest.raises(ConfigError):
        Ladder(sizes)


def test_an_empty_ladder_is_refused():
    with pytest.raises(ConfigError):
        Ladder.up_to(0)
