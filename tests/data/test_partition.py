import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.data.federated import FederatedData
from fedstrata.data.partition import (
    IID,
    ByKey,
    Dirichlet,
    FeatureShift,
    OneClass,
    QuantitySkew,
    Shards,
    TwoLevel,
)

LONG_TAIL = [5923, 3597, 2157, 1293, 775, 465, 279, 167, 101, 61]

partitioners = st.one_of(
    st.just(IID()),
    st.builds(Dirichlet, st.floats(1e-3, 1e6)),
    st.builds(OneClass, st.floats(0, 1)),
    st.builds(QuantitySkew, st.floats(1e-3, 1e6)),
    st.just(Shards(1)),
    st.builds(FeatureShift, st.floats(0, 1e6), st.just("y")),
    st.just(TwoLevel(1, Dirichlet(0.5), OneClass(0.5))),
)


@st.composite
def problems(draw):
    labels = draw(st.lists(st.integers(0, 5), min_size=1, max_size=120))
    clients = draw(st.integers(1, min(len(labels), 15)))
    return np.array(labels), clients, draw(st.integers(0, 2**32))


def split(partition, labels, clients, seed=0, **others):
    arrays = {"y": np.asarray(labels), **others}
    return partition.split(arrays, clients, np.random.default_rng(seed))


def assert_partition(parts, total, clients):
    assert len(parts) == clients
    assert all(len(part) > 0 for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(total))


@given(partitioners, problems())
def test_every_sample_has_one_owner_and_every_client_a_sample(partition, problem):
    labels, clients, seed = problem
    assert_partition(split(partition, labels, clients, seed), len(labels), clients)


@given(partitioners, problems())
def test_the_seed_decides(partition, problem):
    labels, clients, seed = problem
    first, second = (split(partition, labels, clients, seed) for _ in range(2))
    assert [part.tolist() for part in first] == [part.tolist() for part in second]


@pytest.mark.parametrize("partition", [IID(), Dirichlet(1.0), OneClass(0.5), QuantitySkew(1.0)])
def test_another_seed_gives_another_split(partition):
    labels = np.arange(200) % 4
    first, second = (split(partition, labels, 4, seed) for seed in (0, 1))
    assert [set(part.tolist()) for part in first] != [set(part.tolist()) for part in second]


@given(problems())
def test_keys_stay_together(problem):
    keys, clients, seed = problem
    values = np.unique(keys)
    clients = min(clients, len(values))
    parts = split(ByKey("site"), np.zeros(len(keys)), clients, seed, site=keys)
    assert_partition(parts, len(keys), clients)
    assert sum(len(np.unique(keys[part])) for part in parts) == len(values)
    if clients == len(values):
        assert [keys[part][0] for part in parts] == values.tolist()


def test_keys_are_grouped_by_size():
    keys = np.repeat(list("abcd"), [50, 30, 20, 10])
    parts = split(ByKey("site"), np.zeros(110), 2, site=keys)
    assert ["".join(sorted(set(keys[part]))) for part in parts] == ["ad", "bc"]


@pytest.mark.parametrize("partition", [IID(), OneClass(0.3)])
def test_sizes_are_equal_to_within_one(partition):
    sizes = [len(part) for part in split(partition, np.arange(103) % 4, 10)]
    assert sorted(set(sizes)) == [10, 11]


def test_a_prefix_of_a_client_is_a_random_sample():
    labels = np.repeat([0, 1], 500)  # sorted by class, as the files often are
    for partition in (IID(), Dirichlet(1e6), OneClass(0.0), QuantitySkew(1e6), ByKey("site")):
        (part,) = split(partition, labels, 1, site=np.zeros(1000))
        assert not np.array_equal(part, np.arange(1000))
        ones = labels[part[:100]].sum()  # hypergeometric: mean 50, standard deviation 4.75
        assert abs(ones - 50) < 4 * 4.75


@pytest.mark.parametrize("clients", [3, 10])
def test_dirichlet_with_large_alpha_is_iid(clients):
    labels = np.repeat(np.arange(5), [100, 250, 17, 1, 632])
    parts = split(Dirichlet(1e12), labels, clients)
    counts = np.array([np.bincount(labels[part], minlength=5) for part in parts])
    # Only the rounding of the shares is left, half a sample at both ends; 1e-3 bounds the draw itself.
    assert np.abs(counts - np.bincount(labels) / clients).max() <= 1 + 1e-3


def test_dirichlet_shares_have_the_right_moments():
    alpha, clients, classes, size = 0.5, 5, 400, 500
    labels = np.repeat(np.arange(classes), size)
    parts = split(Dirichlet(alpha), labels, clients)
    shares = np.array([np.bincount(labels[part], minlength=classes) for part in parts]) / size
    for sample, expected in (
        (shares[0], 1 / clients),
        (((shares - 1 / clients) ** 2).mean(axis=0), (1 - 1 / clients) / clients / (clients * alpha + 1)),
    ):
        assert abs(sample.mean() - expected) < 4 * sample.std() / np.sqrt(classes)


def test_dirichlet_with_small_alpha_gives_each_class_to_one_client():
    labels = np.repeat(np.arange(40), 50)
    parts = split(Dirichlet(1e-4), labels, 4)
    largest = np.max([np.bincount(labels[part], minlength=40) for part in parts], axis=0)
    assert (largest == 50).mean() > 0.9


@pytest.mark.parametrize("partition", [Dirichlet(0.01, min_size=7), QuantitySkew(0.01, min_size=7)])
def test_min_size_is_kept(partition):
    sizes = [len(part) for part in split(partition, np.arange(150) % 3, 20)]
    assert min(sizes) >= 7


def test_short_clients_are_topped_up_exactly():
    # One class and a tiny alpha: one client gets everything in each of the draws, the others are topped up.
    sizes = sorted(len(part) for part in split(Dirichlet(1e-6, min_size=4), np.zeros(100), 5))
    assert sizes == [4, 4, 4, 4, 84]


def test_one_class_of_balanced_classes_is_pure():
    labels = np.arange(1000) % 10
    parts = split(OneClass(1.0), labels, 20)
    for i, part in enumerate(parts):
        assert set(labels[part].tolist()) == {i % 10}


@pytest.mark.parametrize("q", [0.0, 0.3, 0.7])
def test_one_class_takes_the_fraction_q_and_fills_the_rest_at_random(q):
    labels = np.arange(1000) % 10
    own = [np.sum(labels[split(OneClass(q), labels, 10, seed)[0]] == 0) for seed in range(200)]
    # ⌊100 q⌋ by right; the other draws are hypergeometric: a tenth of what is left is of the class.
    right, drawn, left = round(100 * q), round(100 * (1 - q)), round(1000 * (1 - q))
    variance = drawn * 0.1 * 0.9 * (left - drawn) / (left - 1)
    assert min(own) >= right
    assert abs(np.mean(own) - (right + 0.1 * drawn)) < 4 * np.sqrt(variance / len(own))


def test_one_class_hands_out_small_classes_whole():
    labels = np.repeat([0, 1], [90, 10])
    first, second = split(OneClass(1.0), labels, 2)
    assert np.bincount(labels[first], minlength=2).tolist() == [50, 0]
    assert np.bincount(labels[second], minlength=2).tolist() == [40, 10]


@pytest.mark.parametrize("q", [0.1, 0.29, 0.5, 1.0])
def test_one_class_on_the_long_tail_of_fedmsa(q):
    labels = np.repeat(np.arange(10), LONG_TAIL)
    parts = split(OneClass(q), labels, 100)
    per_client = len(labels) // 100
    for i, part in enumerate(parts):
        own = np.sum(labels[part] == i % 10)
        assert own >= min(int(q * per_client), LONG_TAIL[i % 10] // 10)
        assert len(part) in (per_client, per_client + 1)


def test_one_class_does_not_lose_a_sample_to_rounding():
    labels = np.arange(200) % 2  # 0.29 * 100 is 28.999… in floating point
    for seed in range(20):
        assert np.sum(labels[split(OneClass(0.29), labels, 2, seed)[0]] == 0) >= 29


def test_quantity_skew_sizes_have_the_right_moments():
    alpha, clients, total = 2.0, 4, 10_000
    sizes = np.array([len(split(QuantitySkew(alpha), np.zeros(total), clients, s)[0]) for s in range(400)])
    for sample, expected in (
        (sizes / total, 1 / clients),
        ((sizes / total - 1 / clients) ** 2, (1 - 1 / clients) / clients / (clients * alpha + 1)),
    ):
        assert abs(sample.mean() - expected) < 4 * sample.std() / np.sqrt(400)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_shards_hold_few_classes_in_equal_parts(k):
    labels = np.random.default_rng(0).permutation(np.arange(600) % 10)
    parts = split(Shards(k), labels, 20 // k)  # shards no longer than a class
    assert_partition(parts, 600, 20 // k)
    assert max(len(part) for part in parts) - min(len(part) for part in parts) <= k
    assert all(len(set(labels[part].tolist())) <= 2 * k for part in parts)
    even = split(Shards(2), labels, 5)  # ten shards of ten classes: each is one class
    assert all(len(set(labels[part].tolist())) == 2 for part in even)


def test_feature_shift_moves_features_and_nothing_else():
    rng = np.random.default_rng(1)
    x, labels = rng.normal(size=(900, 5)), np.arange(900) % 3
    parts = split(FeatureShift(), labels, 3, x=x)
    for part in parts:
        assert np.bincount(labels[part]).tolist() == [100, 100, 100]
    # Thirds of a normal distribution, sorted: the outer means are ±1.0911 deviations along the direction.
    means = np.array([x[part].mean(axis=0) for part in parts])
    apart = means[2] - means[0]
    np.testing.assert_allclose(np.linalg.norm(apart), 2 * 1.0911, rtol=0.1)
    along = x @ (apart / np.linalg.norm(apart))
    assert along[parts[0]].mean() < along[parts[1]].mean() < along[parts[2]].mean()
    noisy = split(FeatureShift(1e6), labels, 3, x=x)
    spread = np.array([x[part].mean(axis=0) for part in noisy])
    assert np.abs(spread).max() < 4 / np.sqrt(300)


def test_a_constant_or_continuous_label_and_images_can_be_shifted():
    images = np.random.default_rng(0).normal(size=(31, 4, 4))
    parts = split(FeatureShift(), np.linspace(0.1, 1, 31), 4, x=images)
    assert_partition(parts, 31, 4)
    assert sorted(len(part) for part in parts) == [7, 8, 8, 8]
    with pytest.raises(KeyError, match="needs the array 'x'"):
        split(FeatureShift(), np.zeros(4), 2)


def test_two_levels_apply_one_rule_between_and_one_within():
    labels = np.arange(120) % 2
    parts = split(TwoLevel(2, OneClass(1.0), QuantitySkew(0.5)), labels, 5)
    assert_partition(parts, 120, 5)
    assert [set(labels[part].tolist()) for part in parts] == [{0}] * 3 + [{1}] * 2
    assert sum(len(part) for part in parts[:3]) == 60


def test_labels_may_be_names_or_signs():
    assert_partition(split(Dirichlet(0.5), np.array(["cat", "dog"] * 20), 4), 40, 4)
    assert_partition(split(OneClass(0.5), np.array([-1.0, 1.0] * 20), 4), 40, 4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Dirichlet(0), "number > 0"),
        (lambda: Dirichlet(float("nan")), "number > 0"),
        (lambda: Dirichlet(float("inf")), "IID"),
        (lambda: Dirichlet("0.3"), "alpha must be"),
        (lambda: Dirichlet(1.0, min_size=0), "min_size"),
        (lambda: Dirichlet(1.0, min_size=2.5), "min_size"),
        (lambda: QuantitySkew(-1.0), "QuantitySkew: alpha must be a finite"),
        (lambda: OneClass(1.5), r"in \[0, 1\]"),
        (lambda: OneClass(True), r"in \[0, 1\]"),
        (lambda: ByKey(3), "name of an array"),
        (lambda: Shards(0), "per_client"),
        (lambda: FeatureShift(-1.0), "number ≥ 0"),
        (lambda: FeatureShift(float("inf")), "IID"),
        (lambda: TwoLevel(0, IID()), "groups"),
        (lambda: TwoLevel(2, "iid"), "outer must be a partition"),
    ],
)
def test_bad_arguments_are_refused_at_construction(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()


@pytest.mark.parametrize(
    ("partition", "arrays", "clients", "message"),
    [
        (IID(), {}, 2, "nothing to split"),
        (IID(), {"y": np.zeros(3), "x": np.zeros(4)}, 2, "same number of samples"),
        (IID(), {"y": np.float32(1)}, 1, "first axis"),
        (IID(), {"y": np.zeros(3)}, 4, "at least 4 samples"),
        (IID(), {"y": np.zeros(3)}, 0, "clients must be"),
        (IID(), {"y": np.zeros(3)}, -1, "clients must be"),
        (Dirichlet(1.0, min_size=5), {"y": np.zeros(19)}, 4, "need 20 samples, but there are only 19"),
        (QuantitySkew(1.0, min_size=5), {"y": np.zeros(19)}, 4, "need 20 samples"),
        (Dirichlet(1.0), {"y": np.linspace(0, 1, 9)}, 3, "continuous"),
        (OneClass(0.5), {"y": np.zeros((9, 2))}, 3, "one value of 'y' per sample"),
        (Shards(3), {"y": np.zeros(8)}, 3, "need 9 samples, but there are only 8"),
        (Shards(1), {"y": np.linspace(0, 1, 9)}, 3, "continuous"),
        (TwoLevel(4, IID()), {"y": np.zeros(8)}, 3, "4 groups need at least as many clients"),
        (TwoLevel(2, ByKey("y")), {"y": np.array([0, 1, 1, 1])}, 4, "1 samples cannot be divided among 2"),
        (ByKey("site"), {"y": np.zeros(4), "site": np.array([0, 0, 1, 1])}, 3, "only 2 different values"),
    ],
)
def test_bad_data_is_refused(partition, arrays, clients, message):
    with pytest.raises(ValueError, match=message):
        partition.split(arrays, clients, np.random.default_rng(0))


@pytest.mark.parametrize("partition", [Dirichlet(1.0), OneClass(0.5), ByKey("site"), Shards(1)])
def test_a_missing_array_is_named(partition):
    with pytest.raises(KeyError, match="but there are only \\['x'\\]"):
        partition.split({"x": np.zeros(4)}, 2, np.random.default_rng(0))


def cells(figure):
    """The numbers in a heat map of samples, by client and class."""
    return np.asarray(figure.axes[0].collections[0].get_array())


def test_the_picture_shows_every_sample(tmp_path):
    labels = np.arange(300) % 12
    path = tmp_path / "split.png"
    figure = Dirichlet(0.5).draw({"y": labels}, 6, path=path)
    assert cells(figure).sum(axis=0).tolist() == np.bincount(labels).tolist()
    assert matplotlib.image.imread(path).std() > 0


def test_the_picture_is_of_the_split_that_is_used():
    arrays = {"x": np.zeros((90, 2)), "y": np.arange(90) % 3}
    figure = Dirichlet(0.3).draw(arrays, 5, seed=7)
    data = FederatedData.from_arrays(arrays, 5, Dirichlet(0.3), seed=7)
    assert cells(figure).sum(axis=1).tolist() == data.sizes.tolist()


@pytest.mark.parametrize(
    "arrays", [{"x": np.zeros(80)}, {"y": np.linspace(0, 1, 80)}, {"y": np.zeros((80, 2))}]
)
def test_the_picture_of_unlabelled_data_shows_sizes(arrays):
    figure = QuantitySkew(0.5).draw(arrays, 40)
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == 80
