"""Tables of clients: columns, words and gaps, against numbers worked out by hand and scikit-learn."""

import types

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import StandardScaler

import fedstrata as fs

ROWS = {
    "site": ["north", "south", "north", "south", "south"],
    "age": [50, 40, 60, 30, 20],
    "dose": [0.5, 1.5, 2.5, 3.5, 4.5],
    "smokes": [True, False, False, True, True],
    "ill": [1, 0, 0, 1, 1],
}
BOTH = pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame], ids=["pandas", "polars"])


def from_rows(frame, rows=ROWS, **options):
    return fs.FederatedData.from_dataframe(frame(rows), **{"by": "site", "label": "ill", **options})


@BOTH
def test_columns_become_features(frame):
    data = from_rows(frame)
    assert data.names == ("north", "south")
    assert data.client(0)["x"].tolist() == [[50, 0.5, 1], [60, 2.5, 0]]
    assert data.client(1)["x"].tolist() == [[40, 1.5, 0], [30, 3.5, 1], [20, 4.5, 1]]
    assert data.client(1)["y"].tolist() == [0, 1, 1]
    assert data.train["x"].dtype == np.float32
    assert data.train["y"].dtype == np.int32
    assert data.preparation.features == ("age", "dose", "smokes")
    assert data.preparation.ledger == fs.Ledger()
    assert from_rows(frame, features=["dose"], label="age").client(0)["x"].tolist() == [[0.5], [2.5]]


def test_further_columns_and_the_servers_rows(tmp_path):
    """``extra`` are entries of a sample and no features; the server's rows are prepared as the clients'."""
    own = {"age": [1, 2], "dose": [3.0, 4.0], "ill": [0, 1]}
    data = from_rows(pd.DataFrame, extra=["smokes"], server=own, test_fraction=0.5)
    assert data.preparation.features == ("age", "dose")
    assert {name: len(data.test[name]) for name in data.test} == dict.fromkeys(
        ("client", "smokes", "x", "y"), 3
    )
    every = from_rows(pd.DataFrame, extra=["smokes"])
    assert every.client(1)["smokes"].tolist() == [0, 1, 1]
    np.testing.assert_array_equal(data.server["x"], [[1, 3], [2, 4]])
    np.testing.assert_array_equal(data.server["y"], [0, 1])
    for name, text in (("a", "age,group,ill\n50,1,0\n40,0,1\n"), ("server", "age,ill\n30,1\n")):
        (tmp_path / f"{name}.csv").write_text(text)
    options = {"label": "ill", "extra": ["group"], "server": tmp_path / "server.csv"}
    read = fs.data.from_csv([tmp_path / "a.csv"], **options)
    assert read.train["group"].tolist() == [1, 0]
    assert read.server["x"].tolist() == [[30]]


@BOTH
def test_a_frame_for_each_client(frame):
    whole = frame({name: values for name, values in ROWS.items() if name != "site"})
    parts = {"a": whole[:2], "b": whole[2:]}
    data = fs.FederatedData.from_dataframe(parts, label="ill")
    assert data.names == ("a", "b")
    assert data.sizes.tolist() == [2, 3]
    assert fs.FederatedData.from_dataframe(list(parts.values()), label="ill").names == (
        "client 0",
        "client 1",
    )
    with pytest.raises(fs.DataError, match="one for each client"):
        fs.FederatedData.from_dataframe(parts, by="site", label="ill")


@BOTH
def test_words_are_named_or_encoded(frame):
    rows = ROWS | {"pain": ["none", "angina", "none", "none", "other"], "ill": list("yynyn")}
    with pytest.raises(fs.DataError, match=r"'pain' \(such as 'none'\), 'ill' \(such as 'y'\).*encode=True"):
        from_rows(frame, rows)
    data = from_rows(frame, rows, features=["age", "pain"], encode=True)
    assert data.preparation.features == ("age", "pain=angina", "pain=none", "pain=other")
    assert data.client(1)["x"].tolist() == [[40, 1, 0, 0], [30, 0, 1, 0], [20, 0, 0, 1]]
    assert data.client(0)["y"].tolist() == [1, 0]
    ledger = data.preparation.ledger
    # Up: "none", "n", "y" of north; "angina", "none", "other", "n", "y" of south, a byte for each end.
    assert ledger.bytes_up == (5 + 2 + 2) + (7 + 5 + 6 + 2 + 2)
    assert ledger.bytes_down == 2 * (7 + 5 + 6 + 2 + 2)
    assert ledger.gathers == ledger.exchanges == 1

    new = data.preparation.apply(frame({"pain": ["other"], "age": [1], "more": ["?"]}))
    assert new["x"].tolist() == [[1, 0, 0, 1]]
    assert set(new) == {"x"}
    assert data.preparation.apply({"pain": ["none"], "age": [2], "ill": ["y"]})["y"].tolist() == [1]
    with pytest.raises(fs.DataError, match="'pain' has 'cough', which no client had in training"):
        data.preparation.apply(frame({"pain": ["cough"], "age": [1]}))
    with pytest.raises(fs.DataError, match="no column 'pain'"):
        data.preparation.apply(frame({"age": [1]}))


@BOTH
def test_gaps_are_named_or_filled(frame):
    rows = ROWS | {"dose": [0.5, None, 2.5, 3.5, None], "pain": ["a", None, "b", "a", "a"]}
    with pytest.raises(
        fs.DataError, match=r"missing in the columns 'dose' \(2\), 'pain' \(1\)\. Give impute="
    ):
        from_rows(frame, rows, encode=True)
    data = from_rows(frame, rows, features=["dose", "pain"], encode=True, impute="mean")
    mean = (0.5 + 2.5 + 3.5) / 3
    np.testing.assert_allclose(
        data.client(1)["x"], [[mean, 0.75, 0.25], [3.5, 1, 0], [mean, 1, 0]], rtol=1e-6
    )
    new = data.preparation.apply(frame({"dose": [None, 1.0], "pain": ["b", None]}))
    np.testing.assert_allclose(new["x"], [[mean, 0, 1], [1, 0.75, 0.25]], rtol=1e-6)
    # Counts and sums of three features up, their means down, beside the categories.
    assert data.preparation.ledger.floats_up == 2 * 6
    assert data.preparation.ledger.floats_down == 2 * 3


@BOTH
def test_imputed_and_scaled_as_scikit_learn_does_with_the_pooled_training_rows(frame):
    rng = np.random.default_rng(0)
    x = rng.normal(3.0, [1.0, 5.0, 0.1], size=(90, 3)) + np.repeat([0, 1, 4], 30)[:, None]
    x[rng.random(x.shape) < 0.2] = np.nan
    x[:, 2] = np.where(np.isnan(x[:, 2]), np.nan, 7.1)  # does not vary
    rows = {f"f{j}": x[:, j] for j in range(3)} | {
        "site": np.repeat([10, 9, 8], 30),
        "y": rng.normal(size=90),
    }
    options = {"label": "y", "valid_fraction": 0.2, "test_fraction": 0.2, "impute": "mean", "seed": 3}
    raw = from_rows(frame, rows, **options)
    assert raw.names == ("8", "9", "10")
    data = fs.data.standardize(raw)
    y = np.asarray(rows["y"], np.float32)
    chosen = [int(np.flatnonzero(y == value)[0]) for value in data.train["y"]]
    filler, scaler = SimpleImputer(), StandardScaler()
    np.testing.assert_allclose(
        data.train["x"], scaler.fit_transform(filler.fit_transform(x[chosen])), atol=1e-5
    )
    held = [int(np.flatnonzero(y == value)[0]) for value in data.test["y"]]
    np.testing.assert_allclose(data.test["x"], scaler.transform(filler.transform(x[held])), atol=1e-5)
    np.testing.assert_allclose(
        data.preparation.apply(frame(rows))["x"], scaler.transform(filler.transform(x)), atol=1e-5
    )
    np.testing.assert_allclose(data.train["x"].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(data.train["x"].std(axis=0), [1, 1, 0], atol=1e-6)
    # Means: counts and sums up. Scaling: the same, then squares; means and deviations down.
    ledger = data.preparation.ledger
    assert ledger.exchanges == 3
    assert ledger.bytes_up == 8 * 3 * 3 * (2 + 2 + 1)
    assert ledger.bytes_down == 8 * 3 * 3 * (1 + 1 + 1)


def test_missing_numbers_of_pandas_nullable_types():
    frame = pd.DataFrame(ROWS).convert_dtypes()
    frame.loc[0, "age"] = pd.NA
    frame.loc[1, "smokes"] = pd.NA
    data = fs.FederatedData.from_dataframe(frame, by="site", label="ill", impute="mean")
    assert data.client(0)["x"].tolist() == [[37.5, 0.5, 1], [60, 2.5, 0]]
    np.testing.assert_allclose(data.client(1)["x"][0], [40, 1.5, 0.75])


def test_what_is_held_out_is_drawn_class_by_class_and_client_by_client():
    rng = np.random.default_rng(1)
    sizes, ill = [100, 40], [8, 30]
    frames = {}
    for name, size, positive in zip("ab", sizes, ill, strict=True):
        y = rng.permutation(np.arange(size) < positive).astype(int)
        frames[name] = pd.DataFrame({"id": np.arange(size), "y": y})
    options = {"label": "y", "valid_fraction": 0.25, "test_fraction": 0.2, "seed": 5}
    data = fs.FederatedData.from_dataframe(frames, **options)
    assert data.sizes.tolist() == [55, 22]
    assert data.valid_sizes.tolist() == [25, 10]
    assert np.bincount(data.test["client"]).tolist() == [20, 8]
    for i, (size, positive) in enumerate(zip(sizes, ill, strict=True)):
        parts = [
            data.client(i),
            data.client(i, "valid"),
            {k: v[data.test["client"] == i] for k, v in data.test.items()},
        ]
        ids = np.concatenate([part["x"][:, 0] for part in parts])
        assert sorted(ids.tolist()) == list(range(size))
        for part, fraction in zip(parts, (0.55, 0.25, 0.2), strict=True):
            assert abs(part["y"].sum() - fraction * positive) <= 1.5
            assert (np.diff(part["x"][:, 0]) > 0).all()
    # A client's own split does not depend on the others.
    alone = fs.FederatedData.from_dataframe({"a": frames["a"]}, **options)
    np.testing.assert_array_equal(alone.train["x"], data.client(0)["x"])
    other = fs.FederatedData.from_dataframe(frames, **(options | {"seed": 6}))
    assert not np.array_equal(other.client(0)["x"], data.client(0)["x"])


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ({}, {"by": None}, "Give by=.*'site', 'age'"),
        ({}, {"by": "sight"}, "no column 'sight'. Did you mean 'site'"),
        ({}, {"label": "sick"}, "no column 'sick'"),
        ({}, {"label": None}, "no column None. It has"),
        ({}, {"features": ["age", "wight"]}, "no column 'wight'"),
        ({}, {"features": "age"}, r"features=\['age'\]"),
        ({}, {"features": ["ill"]}, "cannot be a feature too"),
        ({}, {"features": []}, "no features"),
        ({}, {"features": ["age", "age"]}, "named twice"),
        ({}, {"impute": "median"}, "impute must be 'mean'"),
        ({}, {"valid_fraction": 0.5, "test_fraction": 0.5}, "nothing is left"),
        ({}, {"test_fraction": 1.0}, r"in \[0, 1\)"),
        ({}, {"valid_fraction": 0.1}, "north has 2 rows: too few"),
        ({"ill": [1, 0, None, 1, 1]}, {}, "north: the label 'ill' is missing in 1 rows, first in row 1"),
        ({"site": ["a", None, "a", "b", "b"]}, {}, "'site' is missing in 1 rows, first in row 1"),
        ({"age": [None] * 5}, {"impute": "mean"}, "No training row of any client has a value in 'age'"),
        ({"day": pd.to_datetime(["2020-01-01"] * 5)}, {"encode": True}, "'day' is of type Datetime.*numbers"),
        ({"day": ["2020-01-31"] * 5}, {"encode": True}, "'day' holds dates such as '2020-01-31'.*features="),
        ({"day": ["31.1.20", None, *["1/2/2020 10:30"] * 3]}, {"encode": True}, "'day' holds dates"),
        ({"dose": ["1", "2", "high", "3", "4"]}, {}, r"'dose' \(such as 'high'\)"),
        ({"dose": pd.Categorical([1, 2, 1, 1, 2])}, {}, r"'dose' \(such as '1'\)"),
        ({"age": [1.0, np.inf, 2.0, 3.0, 4.0]}, {"impute": "mean"}, "'age' is infinite in row"),
        ({"age": [1.0, 1e39, 2.0, 3.0, 4.0]}, {}, r"'age' is infinite in row . as float32: 1e\+39"),
    ],
)
def test_what_is_wrong_is_named(rows, options, message):
    with pytest.raises(fs.DataError, match=message):
        from_rows(pd.DataFrame, ROWS | rows, **options)


def test_what_is_no_frame_is_told_where_to_go():
    with pytest.raises(fs.DataError, match=r"not a data frame .* ndarray.*from_arrays"):
        fs.FederatedData.from_dataframe(np.ones((3, 2)), by="a", label="b")
    other = types.SimpleNamespace(to_pandas=lambda: pd.DataFrame(ROWS))  # as a Hugging Face data set has
    with pytest.raises(fs.DataError, match=r"SimpleNamespace\. Give its \.to_pandas\(\)"):
        fs.FederatedData.from_dataframe(other, by="site", label="ill")
    with pytest.raises(fs.DataError, match=r"the data frame: .* unique column names"):
        fs.FederatedData.from_dataframe(pd.DataFrame(np.ones((2, 2)), columns=["a", "a"]), by="a", label="b")
    with pytest.raises(fs.DataError, match=r"LazyFrame\. Give its \.collect"):
        fs.FederatedData.from_dataframe(pl.LazyFrame(ROWS), by="site", label="ill")
    frames = {"a": pd.DataFrame({"u": [1], "y": [0]}), "b": pd.DataFrame({"u": ["x"], "y": [0]})}
    with pytest.raises(fs.DataError, match="'u' is numeric in a, but b has 'x' in row 0"):
        fs.FederatedData.from_dataframe(frames, label="y")
    frames["b"] = pd.DataFrame({"u": [1], "y": [0], "v": [2]})
    with pytest.raises(fs.DataError, match="b has a column 'v' that a lacks"):
        fs.FederatedData.from_dataframe(frames, label="y")


def test_clients_with_gaps_are_scaled_from_a_list():
    clients = [{"x": np.array([[1.0], [np.nan]]), "y": [0, 1]}, {"x": np.array([[5.0], [3.0]]), "y": [1, 1]}]
    with pytest.raises(
        fs.DataError, match=r"client 0\['x'\] has a NaN.*standardize\(clients, impute='mean'\)"
    ):
        fs.FederatedData.from_clients(clients)
    with pytest.raises(fs.DataError, match=r"client 0: 'x' has missing values.*impute='mean'"):
        fs.data.standardize(clients)
    data = fs.data.standardize(clients, impute="mean")
    deviation = np.sqrt((4 + 0 + 4 + 0) / 4)
    np.testing.assert_allclose(data.train["x"].ravel(), np.array([-2, 0, 2, 0]) / deviation)
    new = data.preparation.apply({"x": np.array([[np.nan], [3 + deviation]])})
    np.testing.assert_allclose(new["x"].ravel(), [0, 1])
    with pytest.raises(fs.DataError, match="no array 'z'; it has 'x', 'y'"):
        fs.data.standardize(clients, of=("z",))
    with pytest.raises(fs.DataError, match=r"shape \(2,\), but needs \(1,\)"):
        data.preparation.apply({"x": np.ones((3, 2))})


class TestFiles:
    @pytest.fixture
    def sites(self, tmp_path):
        (tmp_path / "site-b.csv").write_text("age,pain,ill\n50,none,1\n60,?,0\n")
        (tmp_path / "site-a.csv").write_text("﻿ill, age,pain\n0,40.5,angina\n1,NA,none\n1,20,none\n", "utf-8")
        return tmp_path

    def test_a_client_per_file(self, sites):
        data = fs.data.from_csv(sites / "site-*.csv", label="ill", encode=True, impute="mean")
        assert data.names == ("site-a", "site-b")
        assert data.preparation.features == ("age", "pain=angina", "pain=none")
        age = (40.5 + 20 + 50 + 60) / 4
        expected = [[40.5, 1, 0], [age, 0, 1], [20, 0, 1]]
        np.testing.assert_allclose(data.client(0)["x"], expected, rtol=1e-6)
        np.testing.assert_allclose(data.client(1)["x"], [[50, 0, 1], [60, 0.25, 0.75]])
        assert data.client(0)["y"].dtype == np.int32
        named = fs.data.from_csv(
            [sites / "site-b.csv", sites / "site-a.csv"], label="ill", features=["age"], impute="mean"
        )
        assert named.names == ("site-b", "site-a")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("age,pain,ill\n", "header and at least one row"),
            (
                "age;pain;ill\n1;a;0\n",
                "site-c.csv: the header is one cell, 'age;pain;ill'. Give delimiter=';'",
            ),
            ("age,pain,ill\n1,2\n", "row 1 has 2 cells, the header has 3"),
            ("age,age,ill\n1,2,3\n", "name every column once"),
            ("age,ill\n1,0\n", "site-a has a column 'pain' that site-c lacks.*features="),
            ("age,pain,ill\n5,a,0\nold,a,0\n", "'age' is numeric in site-a, but site-c has 'old' in row 1"),
        ],
    )
    def test_what_is_wrong_is_named(self, sites, text, message):
        (sites / "site-c.csv").write_text(text)
        with pytest.raises(fs.DataError, match=message):
            fs.data.from_csv(f"{sites}/site-*.csv", label="ill", encode=True, impute="mean")

    def test_no_file(self, tmp_path):
        with pytest.raises(fs.DataError, match=r"No file .*nothing-\*\.csv"):
            fs.data.from_csv(tmp_path / "nothing-*.csv", label="y")
        with pytest.raises(fs.DataError, match=r"File not found.*nothing\.csv"):
            fs.data.from_csv([tmp_path / "nothing.csv"], label="y")

    def test_a_column_without_values_is_of_the_kind_of_the_others(self, sites):
        (sites / "site-c.csv").write_text("age,pain,ill\n1,,0\n2,,1\n")
        data = fs.data.from_csv(f"{sites}/site-*.csv", label="ill", encode=True, impute="mean")
        np.testing.assert_allclose(data.client(2)["x"], [[1, 0.25, 0.75], [2, 0.25, 0.75]])


class TestHeart:
    def test_the_table_is_the_published_one(self):
        arrays = fs.data.load("heart")
        assert arrays["x"].shape == (920, 13)
        sites, sizes = np.unique(arrays["site"], return_counts=True)
        assert dict(zip(sites, sizes, strict=True)) == {
            "Cleveland": 303, "Hungary": 294, "Long Beach": 200, "Zurich": 123
        }  # fmt: skip
        ill = {str(site): int(arrays["y"][arrays["site"] == site].sum()) for site in sites}
        assert ill == {"Cleveland": 139, "Hungary": 106, "Long Beach": 149, "Zurich": 115}
        names = arrays["feature_names"].tolist()
        missing = np.isnan(arrays["x"]).sum(axis=0)
        assert missing[names.index("ca")] == 4 + 291 + 198 + 118
        assert missing[names.index("age")] == 0
        first = [63, 1, 1, 145, 233, 1, 2, 150, 0, 2.3, 3, 0, 6]  # of processed.cleveland.data
        assert arrays["x"][0].tolist() == first
        assert set(arrays["num"].tolist()) == {0, 1, 2, 3, 4}

    def test_it_is_the_published_file(self, data_dir):
        if not (data_dir / "heart").is_dir():
            pytest.skip("FEDSTRATA_DATA has no heart/processed.*.data")
        for file, name in {
            "cleveland": "Cleveland",
            "hungarian": "Hungary",
            "switzerland": "Zurich",
            "va": "Long Beach",
        }.items():
            text = (data_dir / "heart" / f"processed.{file}.data").read_text().replace("?", "nan").split()
            rows = np.array([line.split(",") for line in text], float)
            arrays = fs.data.load("heart")
            own = arrays["site"] == name
            np.testing.assert_array_equal(arrays["x"][own], rows[:, :-1])
            np.testing.assert_array_equal(arrays["num"][own], rows[:, -1])

    def test_codes_are_words_and_impossible_zeros_are_missing(self):
        data = fs.data.heart(test_fraction=0, standardize=False)
        names = data.preparation.features
        assert data.sizes.tolist() == [303, 294, 200, 123]
        x = dict(zip(names, data.client(0)["x"][0].tolist(), strict=True))
        assert x["age"] == 63
        assert [x[name] for name in ("cp=typical", "restecg=hypertrophy", "slope=down", "thal=fixed")] == [
            1
        ] * 4
        chol = fs.data.load("heart")["x"][:, 4]
        mean = chol[chol > 0].mean()
        np.testing.assert_allclose(data.client(3)["x"][:, names.index("chol")], mean, rtol=1e-6)
        assert data.preparation.apply(
            {"age": [50], "sex": [1], "cp": ["none"], "trestbps": [None], "chol": [None], "fbs": [0]}
            | {"restecg": ["normal"], "thalach": [150], "exang": [0], "oldpeak": [0.0], "slope": ["up"]}
            | {"ca": [0], "thal": ["normal"]}
        )["x"][0, names.index("chol")] == np.float32(mean)

    def test_over_the_folds_every_patient_is_tested_once(self):
        tested = []
        for k in range(5):
            data = fs.data.heart(valid_fraction=0.2, fold=(k, 5), standardize=False)
            counts = np.bincount(data.test["client"])
            assert (counts + data.sizes + data.valid_sizes).tolist() == [303, 294, 200, 123]
            zurich = data.test["y"][data.test["client"] == 3]
            assert (zurich == 0).sum() in (1, 2)  # eight are well
            names = data.preparation.features
            kept = [names.index(name) for name in ("age", "sex", "cp=none")]  # never imputed
            tested.append(np.column_stack([data.test["client"], data.test["x"][:, kept], data.test["y"]]))
        arrays = fs.data.load("heart")
        site = np.unique(arrays["site"], return_inverse=True)[1]
        everyone = np.column_stack([site, arrays["x"][:, [0, 1]], arrays["x"][:, 2] == 4, arrays["y"]])
        assert sorted(np.concatenate(tested).tolist()) == sorted(everyone.tolist())
        with pytest.raises(fs.DataError, match="fold"):
            fs.data.heart(fold=(5, 5))

    def test_statistics_are_of_the_training_patients(self):
        data = fs.data.heart(valid_fraction=0.25)
        np.testing.assert_allclose(data.train["x"].mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(data.train["x"].std(axis=0), 1, atol=1e-4)
        ledger = data.preparation.ledger
        assert ledger.exchanges == 4  # categories, means, means again, squares
        assert ledger.floats_up == 4 * 22 * (2 + 2 + 1)


def csv(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text.replace(" ", "\n") + "\n")
    return folder / "*.csv"


def test_true_and_false_of_csv_files_are_numbers(tmp_path):
    data = fs.data.from_csv(
        csv(tmp_path, a="s,y TRUE,no false,yes", b="s,y 0,no 1,yes"), label="y", encode=True
    )
    assert data.preparation.features == ("s",)
    assert data.client(0)["x"].tolist() == [[1], [0]]
    frame = pd.DataFrame({"s": [True, False]})
    assert data.preparation.apply(frame)["x"].tolist() == [[1], [0]]


def test_columns_that_are_words_by_accident_are_told(tmp_path):
    files = csv(tmp_path, a="u,y 1,0 -,1 2,1", b="u,y 3,1 -,0")
    with pytest.warns(UserWarning, match=r"'u' has numbers, and words such as '-'.*missing=\["):
        fs.data.from_csv(files, label="y", encode=True)
    data = fs.data.from_csv(files, label="y", impute="mean", missing=["-"])
    assert data.client(0)["x"].ravel().tolist() == [1, 2, 2]
    rows = {"site": ["a"] * 20, "who": [f"P{i}" for i in range(20)], "ill": [0, 1] * 10}
    with pytest.warns(UserWarning, match="'who' has 20 categories in 20 rows, such as 'P0'"):
        from_rows(pd.DataFrame, rows, encode=True)
    files = csv(tmp_path, a="u,y 1,Yes 2,No", b="u,y 3,yes 4,no")
    with pytest.warns(UserWarning, match="'y' has 'No' and 'no', which count as two categories"):
        fs.data.from_csv(files, label="y", encode=True)


@pytest.mark.parametrize(("apart", "warned"), [(1, True), (100_000, False)])
def test_digits_that_float32_has_not_are_told(apart, warned, recwarn):
    rows = {"site": list("aabb"), "u": [1_700_000_000 + apart * i for i in range(4)], "ill": [0, 1, 0, 1]}
    from_rows(pd.DataFrame, rows)
    told = [str(w.message) for w in recwarn]
    assert [t.startswith("'u' lies between 1700000000 and 1700000003") for t in told] == [True] * warned


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame, dict])
def test_whole_numbers_of_64_bits_stay_what_they_are(frame):
    """Such as keys that are hashes: they must neither wrap around nor be mixed up."""
    large = np.array([2**63, 2**63, 2**63 + 1, 2**64 - 1], np.uint64)
    rows = {"who": large, "a": large, "y": [0, 1, 1, 0]}
    if frame is dict:
        data = fs.FederatedData.from_dataframe({"one": rows}, label="y", features=["a"])
    else:
        data = fs.FederatedData.from_dataframe(frame(rows), by="who", label="y", features=["a"])
        assert data.names == tuple(str(key) for key in sorted(set(large.tolist())))
    assert data.client(0)["x"][0, 0] == np.float32(2.0**63)


def test_columns_of_unequal_length_are_told():
    with pytest.raises(fs.data.DataError, match=r"one has columns of unequal length \('a' 3, 'y' 2\)"):
        fs.FederatedData.from_dataframe({"one": {"a": [1, 2, 3], "y": [0, 1]}}, label="y")
    most = fs.FederatedData.from_dataframe({"one": {"a": [5, 2**64 - 1], "y": [0, 1]}}, label="y")
    assert most.client(0)["x"][:, 0].tolist() == [5.0, 2.0**64]
    with pytest.raises(fs.data.DataError, match=r"one: 'a' has whole numbers beyond 64 bits"):
        fs.FederatedData.from_dataframe({"one": {"a": [1, 2**64], "y": [0, 1]}}, label="y")


def test_columns_without_names_are_told():
    with pytest.raises(fs.DataError, match=r"such as 0: rename them, df\.columns = "):
        fs.FederatedData.from_dataframe(pd.DataFrame(np.ones((3, 2))), by=0, label=1)


def test_a_preparation_is_saved_and_applied_to_a_file(tmp_path):
    files = csv(
        tmp_path, a="age,pain,ill 50,none,no ,some,yes 41,none,no", b="age,pain,ill 30,,yes 77,none,no"
    )
    data = fs.data.standardize(fs.data.from_csv(files, label="ill", encode=True, impute="mean"))
    file = data.preparation.save(tmp_path / "model" / "prepared.json")
    found = fs.data.Preparation.load(file)
    assert found.features == ("age", "pain=none", "pain=some")
    assert found.classes == ("no", "yes")
    assert found.ledger == data.preparation.ledger
    for i, name in enumerate("ab"):  # the training rows themselves, to the bit
        again = found.apply(tmp_path / f"{name}.csv")
        np.testing.assert_array_equal(again["x"], data.client(i)["x"])
        np.testing.assert_array_equal(again["y"], data.client(i)["y"])
    with pytest.raises(fs.DataError, match="not found"):
        found.apply(tmp_path / "c.csv")


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other", "version": 1}', '{"steps": 1}'])
def test_what_is_no_preparation_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(fs.DataError, match=r"a\.json is not a saved preparation"):
        fs.data.Preparation.load(tmp_path / "a.json")
    with pytest.raises(fs.DataError, match=r"b\.json cannot be read"):
        fs.data.Preparation.load(tmp_path / "b.json")


def test_steps_of_ones_own_are_not_written(tmp_path):
    step = types.SimpleNamespace(apply=lambda raw: raw)
    with pytest.raises(fs.DataError, match="SimpleNamespace cannot be written"):
        fs.data.Preparation((step,)).save(tmp_path / "a.json")


def test_clients_have_names():
    data = fs.FederatedData.from_clients([{"x": np.ones(2)}, {"x": np.ones(3)}], names=["Zurich", "Lyon"])
    assert data.names == ("Zurich", "Lyon")
    with pytest.raises(fs.DataError, match="1 names for 2 clients"):
        fs.FederatedData.from_clients([{"x": np.ones(2)}, {"x": np.ones(3)}], names=["Zurich"])
