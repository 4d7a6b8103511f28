import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlength.plan.pack_pool import PackOptions, PackPool


def packs_of(lengths, options, pool=None, first=0):
    """Drive a pool over samples ``first``, ...; each sample is its own serial number."""
    pool = PackPool(options) if pool is None else pool
    stream = iter(range(first, len(lengths)))
    while True:
        for _ in range(pool.wants()):
            serial = next(stream, None)
            if serial is None:
                pool.close()
                break
            pool.push(lengths[serial], serial)
        if not len(pool):
            return
        yield pool, pool.pop()


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


@given(LENGTHS, st.integers(1, 20), st.sampled_from(["truncate", "split"]))
@settings(max_examples=150, deadline=None)
def test_every_token_is_given_once_in_packs_that_fit(lengths, pool_size, overlong):
    options = PackOptions(40, pool_size, overlong)
    tokens = []
    for pool, pack in packs_of(lengths, options):
        assert 0 < sum(held.length for held in pack) <= 40
        assert len(pool._waiting) <= pool_size
        for held in pack:
            assert held.sample == held.serial
            tokens += [(held.serial, held.start + k) for k in range(held.length)]
    kept = 40 if overlong == "truncate" else 60
    assert sorted(tokens) == [(i, k) for i, n in enumerate(lengths) for k in range(min(n, kept))]


@given(LENGTHS, st.integers(1, 9), st.sampled_from(["split", "truncate", "drop"]), st.data())
@settings(max_examples=150, deadline=None)
def test_a_pool_restored_after_any_pack_gives_the_same_packs(lengths, pool_size, overlong, data):
    lengths = [1, *lengths]
    options = PackOptions(40, pool_size, overlong)
    whole = [pack for _, pack in packs_of(lengths, options)]
    stop = data.draw(st.integers(1, len(whole)))
    pool = next(itertools.islice(packs_of(lengths, options), stop - 1, None))[0]
    again = PackPool(options)
    again.restore(pool.state(), {s: (lengths[s], s) for s in range(pool.reads)})
    assert again.held() == pool.held()
    rest = [pack for _, pack in packs_of(lengths, options, again, first=pool.reads)]
    assert rest == whole[stop:]


def test_a_pack_begins_with_the_oldest_and_is_filled_with_the_longest_that_fit():
    packs = [
        [h.serial for h in pack] for _, pack in packs_of([3, 5, 4, 6, 2, 1], PackOptions(10, 5))
    ]
    # Five are held: 0 is the oldest, 3 is the longest that fits; then 1, 2 and 5; then 4.
    assert packs == [[0, 3], [1, 2, 5], [4]]


def test_no_sample_waits_for_more_than_pool_size_packs():
    lengths = np.random.RandomState(0).randint(1, 100, 3000).tolist()
    given = {}
    reads = {}
    for count, (pool, pack) in enumerate(packs_of(lengths, PackOptions(128, 40))):
        for serial in range(len(reads), pool.reads):
            reads[serial] = count
        given |= {held.serial: count for held in pack}
    assert max(given[s] - reads[s] for s in given) <= 40


def test_packs_of_a_stream_are_nearly_full():
    lengths = np.clip(np.random.RandomState(0).lognormal(5.5, 1, 20_000), 8, 8192).astype(int)
    fills = [
        sum(h.length for h in pack) for _, pack in packs_of(lengths.tolist(), PackOptions(8192))
    ]
    assert np.mean(fills[:-10]) / 8192 > 0.995


def test_a_sample_that_is_too_long_is_refused_by_its_number():
    with pytest.raises(ValueError, match="sample 1 of the stream has 10 tokens.*max_length=5"):
        list(packs_of([3, 10], PackOptions(5)))


def test_dropped_samples_are_told_and_a_stream_of_nothing_else_is_refused():
    told = []
    options = PackOptions(5, 4, "drop", lambda *sample: told.append(sample))
    packs = [[h.serial for h in pack] for _, pack in packs_of([9, 2, 8, 3], options)]
    assert packs == [[1, 3]] and told == [(0, 9), (2, 8)]
    with pytest.raises(ValueError, match="first 4 samples .* are all longer than max_length=5"):
        list(packs_of([9] * 9, options))


@pytest.mark.parametrize(
    ("options", "message"),
    [((0,), "max_length"), ((5, 0), "pool_size"), ((5, 5, "keep"), "overlong must be one of")],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PackOptions(*options)
