"""Made lengths have the shape that their name says."""

import numpy as np
import pytest

from xlength.plan.shapes import PUBLISHED, shape_lengths


def test_lognormal_has_its_mean_and_deviation_and_keeps_its_bounds():
    lengths = shape_lengths("lognormal:5.5,1.0:8,8192", 100_000)
    assert lengths.dtype == np.int64 and len(lengths) == 100_000
    assert lengths.min() == 8 and lengths.max() == 8192
    assert abs(np.log(lengths).mean() - 5.5) < 0.02
    assert abs(np.log(lengths).std() - 1.0) < 0.02


def test_half_of_a_capped_set_is_at_the_cap_and_nothing_above():
    for shape, cap in (("capped", 2048), ("capped:4096", 4096), ("capped:1", 1)):
        lengths = shape_lengths(shape, 20_000)
        assert lengths.max() == cap
        assert (lengths == cap).mean() > 0.48 if cap > 1 else (lengths == 1).all()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_the_published_quantiles(name):
    points = np.array(PUBLISHED[name][1])
    lengths = shape_lengths(name, 200_000)
    found = np.quantile(lengths, np.linspace(0, 1, len(points)))
    assert np.abs(found / points - 1)[:-1].max() < 0.03
    assert lengths.min() >= points[0] and 0.9 * points[-1] < lengths.max() <= points[-1]


def test_published_means_are_those_of_the_sources():
    # Wikipedia at 512 tokens is half padding; SQuAD has 172 tokens on average.
    assert abs(shape_lengths("wikipedia", 200_000).mean() - 255.8) < 3
    assert abs(shape_lengths("squad", 200_000).mean() - 172.0) < 2


def test_lengths_depend_on_shape_number_and_seed_alone():
    first = shape_lengths("uniform:3,9", 1000, seed=4)
    assert (first == shape_lengths("uniform:3,9", 1000, seed=4)).all()
    assert (first != shape_lengths("uniform:3,9", 1000, seed=5)).any()
    assert sorted(set(first.tolist())) == [3, 4, 5, 6, 7, 8, 9]
    assert shape_lengths("uniform:3,9", 8, seed=4).tolist() == [4, 5, 6, 4, 6, 6, 7, 7]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("lognormall:5,1:8,99", "did you mean 'lognormal'"),
        ("zipf", "known are lognormal"),
        ("lognormal:5,1", "lognormal:MU,SIGMA:MIN,MAX"),
        ("lognormal:5,-1:8,99", "sigma in"),
        ("lognormal:5,1:0,99", "1 <= least <= largest"),
        ("lognormal:5,x:8,99", "no numbers"),
        ("uniform:9,3", "got 9 and 3"),
        ("uniform:1.5,3", "whole numbers"),
        ("quantiles:5,4", "rising"),
        ("wikipedia:5", "takes no numbers"),
    ],
)
def test_a_wrong_shape_is_refused_with_its_rule(shape, message):
    with pytest.raises(ValueError, match=message):
        shape_lengths(shape, 10)


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        shape_lengths("capped", 0)
