import gzip
import hashlib
import http.server
import io
import json
import math
import tarfile
import threading

import numpy as np
import pooch
import pytest
from PIL import Image

from fedstrata.data.federated import DataError
from fedstrata.data.partition import ByKey, Dirichlet
from fedstrata.lab.datasets import fetch, formats
from fedstrata.lab.datasets.fetch import DataNotFound, FileForm, RemoteFile
from fedstrata.lab.datasets.formats import CorruptData
from fedstrata.lab.datasets.loaders import (
    adult,
    breast_cancer,
    cifar10,
    cifar100,
    digits,
    fashion_mnist,
    load,
    mnist,
    montevideo_bus,
    wikimaths,
)

IDX_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
ADULT_ROWS = (
    "39, State-gov, 77516, Bachelors, 13, Divorced, Sales, Own-child, White, Male, 2174, 0, 40, Peru, <=50K",
    "28, Private, 338409, Bachelors, 13, Married, Prof-specialty, Wife, Black, Female, 0, 0, 40, Cuba, <=50K",
    "54, ?, 180211, Some-college, 10, Married, ?, Husband, Asian-Pac-Islander, Male, 0, 0, 60, South, >50K",
)


def images(rng, count, shape=(28, 28)):
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), rng.integers(0, 10, count, dtype=np.uint8)


def write_npz(folder, name="mnist", train=30, test=10):
    rng = np.random.default_rng(0)
    (x_train, y_train), (x_test, y_test) = images(rng, train), images(rng, test)
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    np.savez(folder / f"{name}.npz", **arrays)
    return arrays


def write_idx(folder, arrays):
    folder.mkdir()
    for name, key in zip(IDX_NAMES, ("x_train", "y_train", "x_test", "y_test"), strict=True):
        array = arrays[key]
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (folder / name).write_bytes(gzip.compress(header + array.tobytes()))


def write_cifar_binary(path, batches, test):
    with tarfile.open(path, "w:gz") as archive:
        named = [(f"data_batch_{i}.bin", batch) for i, batch in enumerate(batches, start=1)]
        for name, (x, y) in [*named, ("test_batch.bin", test)]:
            planes = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
            raw = np.concatenate([y[:, None], planes], axis=1).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))


def write_cifar100(path, train, test):
    """Records of two labels and three planes, as the publisher's archive has them."""
    with tarfile.open(path, "w:gz") as archive:
        for name, (x, y) in (("train.bin", train), ("test.bin", test)):
            planes = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
            raw = np.concatenate([(y // 5)[:, None], y[:, None], planes], axis=1).astype(np.uint8).tobytes()
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))


def write_adult(folder):
    (folder / "adult.data").write_text("\n".join(ADULT_ROWS) + "\n\n")
    (folder / "adult.test").write_text(
        "|1x3 Cross validator\n" + ADULT_ROWS[1] + ".\n" + ADULT_ROWS[2] + ".\n\n"
    )


def write_wikimaths(folder, pages=8, days=5):
    visits = np.random.default_rng(0).integers(0, 1000, (pages, days))
    graph = {
        "edges": [[0, 1], [1, 2]],
        "weights": [3, 1],
        "node_ids": {f"Page {i}": i for i in reversed(range(pages))},
        "time_periods": days,
        **{
            str(t): {"index": t, "year": 2019, "month": 3, "day": 16 + t, "y": visits[:, t].tolist()}
            for t in range(days)
        },
    }
    (folder / "wikivital_mathematics.json").write_text(json.dumps(graph))
    return visits


class TestFormats:
    def test_image_npz(self, tmp_path):
        arrays = write_npz(tmp_path)
        loaded = load("mnist", tmp_path)
        assert sorted(loaded) == sorted(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(loaded[name], array)
        assert loaded["x_train"].dtype == np.uint8
        assert loaded["y_train"].dtype == np.int32

    @pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
    def test_idx_files_hold_the_same_arrays(self, tmp_path, name):
        arrays = write_npz(tmp_path, "other")
        write_idx(tmp_path / name, arrays)
        loaded = load(name, tmp_path)
        for key, array in arrays.items():
            np.testing.assert_array_equal(loaded[key], array)

    def test_cifar_forms_hold_the_same_arrays(self, tmp_path):
        rng = np.random.default_rng(0)
        batches = [images(rng, 6, (32, 32, 3)) for _ in range(5)]
        test = images(rng, 6, (32, 32, 3))
        binary, grids = tmp_path / "binary", tmp_path / "grids"
        binary.mkdir()
        grids.mkdir()
        write_cifar_binary(binary / "cifar-10-binary.tar.gz", batches, test)
        for i, (x, _) in enumerate([test, *batches]):
            name = f"cifar10_train{i}.webp" if i else "cifar10_test.webp"
            picture = x.reshape(2, 3, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(64, 96, 3)
            Image.fromarray(picture).save(grids / name, lossless=True)
        np.savez(
            grids / "cifar10_labels.npz", y_train=np.concatenate([y for _, y in batches]), y_test=test[1]
        )
        one, other = load("cifar10", binary), load("cifar10", grids)
        assert sorted(one) == sorted(other)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
        np.testing.assert_array_equal(one["x_train"], np.concatenate([x for x, _ in batches]))
        np.testing.assert_array_equal(one["y_test"], test[1])

    def test_cifar100_has_the_hundred_classes(self, tmp_path):
        rng = np.random.default_rng(0)
        (x, _), (x_test, _) = images(rng, 200, (32, 32, 3)), images(rng, 100, (32, 32, 3))
        y, y_test = rng.permutation(200) % 100, np.arange(100)
        write_cifar100(tmp_path / "cifar-100-binary.tar.gz", (x, y), (x_test, y_test))
        loaded = load("cifar100", tmp_path)
        np.testing.assert_array_equal(loaded["x_train"], x)
        np.testing.assert_array_equal(loaded["y_train"], y)
        np.testing.assert_array_equal(loaded["y_test"], y_test)
        data = cifar100(4, data_dir=tmp_path, flat=False)
        assert data.train["x"].shape == (200, 32, 32, 3)
        assert data.train["y"].max() == 99

    def test_adult_as_uci_publishes_it(self, tmp_path):
        write_adult(tmp_path)
        arrays = load("adult", tmp_path)
        names = arrays["feature_names"].tolist()
        assert names[0] == "age"
        assert "workclass=?" in names
        assert arrays["x_train"].dtype == np.float32
        assert arrays["x_train"].shape == (3, len(names))
        assert arrays["y_train"].tolist() == [0, 0, 1]
        assert arrays["y_test"].tolist() == [0, 1]
        assert arrays["group_train"].tolist() == [0, 1, 2]
        assert arrays["sex_train"].tolist() == [1, 0, 1]
        ages = np.array([39, 28, 54.0])
        np.testing.assert_allclose(arrays["x_test"][:, 0], (ages[1:] - ages.mean()) / ages.std(), rtol=1e-6)
        np.testing.assert_array_equal(arrays["x_train"][1:], arrays["x_test"])
        unknown = names.index("workclass=?")
        assert arrays["x_train"][:, unknown].tolist() == [0, 0, 1]

    def test_a_category_seen_only_in_the_test_part_is_no_column(self, tmp_path):
        write_adult(tmp_path)
        path = tmp_path / "adult.test"
        path.write_text(path.read_text().replace("Cuba", "Utopia"))
        arrays = load("adult", tmp_path)
        country = [i for i, name in enumerate(arrays["feature_names"]) if name.startswith("native-country")]
        assert len(country) == 3
        assert arrays["x_test"][:, country].sum(axis=1).tolist() == [0, 1]

    def test_bus_json(self, tmp_path):
        graph = {
            "directed": True,
            "nodes": [
                {"bus_stop": 50, "lon": 1, "lat": 2, "y": [1, 2, 3], "X": {"y": [1, 2, 3]}, "id": 50},
                {"bus_stop": 40, "lon": 3, "lat": 4, "y": [4, 5, 6], "X": {"y": [4, 5, 6]}, "id": 40},
            ],
            "links": [{"weight": 172.2, "source": 50, "target": 40}],
        }
        (tmp_path / "montevideo_bus.json").write_text(json.dumps(graph))
        arrays = load("montevideo_bus", tmp_path)
        assert arrays["visits"].tolist() == [[1, 2, 3], [4, 5, 6]]
        assert arrays["edges"].tolist() == [[0, 1]]
        assert arrays["weights"].tolist() == [172.2]
        assert arrays["bus_stop"].tolist() == [50, 40]

    def test_wikimaths_json(self, tmp_path):
        visits = write_wikimaths(tmp_path)
        arrays = load("wikimaths", tmp_path)
        np.testing.assert_array_equal(arrays["visits"], visits)
        assert arrays["page"].tolist() == [f"Page {i}" for i in range(8)]
        assert arrays["edges"].tolist() == [[0, 1], [1, 2]]


class TestDamage:
    @staticmethod
    def truncate(path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def test_truncated_npz(self, tmp_path):
        write_npz(tmp_path)
        self.truncate(tmp_path / "mnist.npz")
        with pytest.raises(CorruptData, match=r"mnist\.npz cannot be read"):
            load("mnist", tmp_path)

    def test_npz_without_an_array(self, tmp_path):
        np.savez(tmp_path / "mnist.npz", x_train=np.zeros((1, 28, 28), np.uint8))
        with pytest.raises(CorruptData, match=r"mnist\.npz .*no array 'y_train'"):
            load("mnist", tmp_path)

    def test_npz_with_pickled_objects_is_not_run(self, tmp_path):
        arrays = {**write_npz(tmp_path), "y_test": np.array([{}], dtype=object)}
        np.savez(tmp_path / "mnist.npz", **arrays, allow_pickle=True)
        with pytest.raises(CorruptData, match="allow_pickle=False"):
            load("mnist", tmp_path)

    def test_labels_that_do_not_fit(self, tmp_path):
        arrays = write_npz(tmp_path)
        np.savez(tmp_path / "mnist.npz", **{**arrays, "y_test": arrays["y_test"][:-1]})
        with pytest.raises(CorruptData, match="10 images in x_test but labels of shape"):
            load("mnist", tmp_path)
        np.savez(tmp_path / "mnist.npz", **{**arrays, "y_test": arrays["y_test"] + 10})
        with pytest.raises(CorruptData, match="labels beyond 9"):
            load("mnist", tmp_path)

    @pytest.mark.parametrize("damage", ["short gzip", "short payload", "no header", "empty"])
    def test_damaged_idx(self, tmp_path, damage):
        write_idx(tmp_path / "mnist", write_npz(tmp_path, "other"))
        path = tmp_path / "mnist" / IDX_NAMES[2]
        raw = gzip.decompress(path.read_bytes())
        if damage == "short gzip":
            self.truncate(path)
        else:
            payload = {"short payload": raw[:-5], "no header": b"\x01" + raw[1:], "empty": b""}[damage]
            path.write_bytes(gzip.compress(payload))
        with pytest.raises(CorruptData, match=IDX_NAMES[2]):
            load("mnist", tmp_path)

    def test_damaged_cifar_archive(self, tmp_path):
        path = tmp_path / "cifar-10-binary.tar.gz"
        rng = np.random.default_rng(0)
        batches = [images(rng, 2, (32, 32, 3)) for _ in range(5)]
        write_cifar_binary(path, batches[:4], batches[4])
        with pytest.raises(CorruptData, match=r"data_batch_5\.bin is missing"):
            load("cifar10", tmp_path)
        write_cifar_binary(path, batches, batches[0])
        self.truncate(path)
        with pytest.raises(CorruptData, match=r"cifar-10-binary\.tar\.gz cannot be read"):
            load("cifar10", tmp_path)

    def test_damaged_picture(self, tmp_path):
        path = tmp_path / "tile.webp"
        pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path, lossless=True)
        labels = tmp_path / "labels.npz"
        np.savez(labels, y_train=np.zeros(4, np.uint8), y_test=np.zeros(3, np.uint8))
        with pytest.raises(CorruptData, match=r"labels\.npz .*4 images in x_test"):
            formats.read_cifar_grids(labels, path, path)
        self.truncate(path)
        with pytest.raises(CorruptData, match=r"tile\.webp cannot be read"):
            formats.read_cifar_grids(labels, path, path)
        Image.fromarray(pixels[:50]).save(path, lossless=True)
        with pytest.raises(CorruptData, match="not a multiple of 32"):
            formats.read_cifar_grids(labels, path, path)

    def test_damaged_adult(self, tmp_path):
        write_adult(tmp_path)
        path = tmp_path / "adult.data"
        path.write_text(path.read_text().strip()[:-20])
        with pytest.raises(CorruptData, match=r"adult\.data .*line 3 has 11 cells"):
            load("adult", tmp_path)
        path.write_text("")
        with pytest.raises(CorruptData, match="no rows"):
            load("adult", tmp_path)

    def test_short_adult_table(self, tmp_path):
        text = ",".join(formats.ADULT_COLUMNS) + "\n" + ADULT_ROWS[0]
        (tmp_path / "adult.csv.gz").write_bytes(gzip.compress(text.encode()))
        with pytest.raises(CorruptData, match=r"adult\.csv\.gz .*only 1 rows"):
            load("adult", tmp_path)

    @pytest.mark.parametrize(
        "text", ["{", "[]", '{"nodes": [], "links": []}', '{"nodes": [{"y": [1]}], "links": []}']
    )
    def test_damaged_bus_json(self, tmp_path, text):
        (tmp_path / "montevideo_bus.json").write_text(text)
        with pytest.raises(CorruptData, match=r"montevideo_bus\.json cannot be read"):
            load("montevideo_bus", tmp_path)

    @pytest.mark.parametrize(
        ("day", "message"),
        [([1] * 7, "a day without a number"), ([1] * 7 + [None], "visits must be numbers")],
    )
    def test_wikimaths_with_a_gap(self, tmp_path, day, message):
        write_wikimaths(tmp_path)
        path = tmp_path / "wikivital_mathematics.json"
        graph = json.loads(path.read_text())
        graph["3"]["y"] = day
        path.write_text(json.dumps(graph))
        with pytest.raises(CorruptData, match=message):
            load("wikimaths", tmp_path)


@pytest.fixture
def server(tmp_path):
    """Serves the folder `site` on this machine and notes which paths were asked for."""
    folder, asked = tmp_path / "site", []
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/", folder, asked
        httpd.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    monkeypatch.delenv(fetch.ENVIRONMENT, raising=False)
    return tmp_path / "cache" / "fedstrata"


def publish(monkeypatch, url, checksum):
    form = FileForm(("mnist.npz",), formats.read_image_npz, (RemoteFile(url, checksum),))
    monkeypatch.setitem(fetch.FORMS, "mnist", (form,))


class TestLookUp:
    def test_the_argument_comes_before_the_environment(self, tmp_path, monkeypatch):
        one, other = tmp_path / "one", tmp_path / "other"
        for folder, size in ((one, 3), (other, 5)):
            folder.mkdir()
            write_npz(folder, train=size)
        monkeypatch.setenv(fetch.ENVIRONMENT, str(other))
        assert len(load("mnist")["x_train"]) == 5
        assert len(load("mnist", one)["x_train"]) == 3

    def test_a_folder_that_is_given_is_the_only_one_searched(self, tmp_path, monkeypatch):
        write_npz(tmp_path)
        monkeypatch.setenv(fetch.ENVIRONMENT, str(tmp_path))
        monkeypatch.setattr(pooch, "retrieve", lambda *args, **kwargs: pytest.fail("asked the network"))
        empty = tmp_path / "empty"
        with pytest.raises(DataNotFound) as error:
            load("mnist", empty)
        assert isinstance(error.value, FileNotFoundError)
        for part in (
            str(empty),
            "mnist.npz",
            f"mnist/{IDX_NAMES[0]}",
            "FEDSTRATA_DATA",
            "https://storage.googleapis",
        ):
            assert part in str(error.value)

    def test_an_incomplete_form_is_not_read(self, tmp_path):
        write_idx(tmp_path / "mnist", write_npz(tmp_path, "other"))
        (tmp_path / "mnist" / IDX_NAMES[1]).unlink()
        with pytest.raises(DataNotFound, match=IDX_NAMES[1]):
            load("mnist", tmp_path)

    @pytest.mark.parametrize("algorithm", ["sha256", "md5"])
    def test_a_file_is_fetched_once(self, server, cache, monkeypatch, algorithm):
        url, site, asked = server
        write_npz(site)
        digest = hashlib.new(algorithm, (site / "mnist.npz").read_bytes()).hexdigest()
        publish(monkeypatch, url + "mnist.npz", f"{algorithm}:{digest}")
        for _ in range(2):
            assert load("mnist")["x_train"].shape == (30, 28, 28)
        assert asked == ["/mnist.npz"]
        assert (cache / "mnist.npz").is_file()

    def test_the_network_comes_after_the_environment(self, server, cache, monkeypatch, tmp_path):
        url, site, asked = server
        write_npz(site)
        publish(monkeypatch, url + "mnist.npz", None)
        monkeypatch.setenv(fetch.ENVIRONMENT, str(tmp_path))
        assert len(load("mnist")["x_train"]) == 30
        write_npz(tmp_path, train=4)
        assert len(load("mnist")["x_train"]) == 4
        assert len(asked) == 1

    def test_a_wrong_checksum_is_refused(self, server, cache, monkeypatch):
        url, site, _ = server
        write_npz(site)
        publish(monkeypatch, url + "mnist.npz", "sha256:" + "0" * 64)
        with pytest.raises(CorruptData, match=r"not the published mnist\.npz"):
            load("mnist")
        assert not (cache / "mnist.npz").exists()

    def test_what_cannot_be_fetched_is_named(self, server, cache, monkeypatch):
        url, _, _ = server
        publish(monkeypatch, url + "mnist.npz", None)  # the site is empty: 404
        with pytest.raises(DataNotFound, match=r"(?s)could not be fetched.*Put one of these.*mnist\.npz"):
            load("mnist")

    def test_a_data_set_has_one_source_or_none(self):
        for form in (form for forms in fetch.FORMS.values() for form in forms if form.remotes):
            assert len(form.remotes) == len(form.files)
            for file, remote in zip(form.files, form.remotes, strict=True):
                assert remote.url.startswith("https://")
                assert remote.url.endswith("/" + file.split("/")[-1])
                if remote.checksum:
                    algorithm, digest = remote.checksum.split(":")
                    assert len(bytes.fromhex(digest)) == hashlib.new(algorithm).digest_size

    def test_an_unknown_name_is_refused(self):
        with pytest.raises(DataError, match=r"Unknown data set 'mnits'; there are digits, .*wikimaths"):
            load("mnits")


class TestLoaders:
    @pytest.mark.parametrize(("loader", "total", "width"), [(digits, 1797, 64), (breast_cancer, 569, 30)])
    def test_bundled(self, loader, total, width):
        data = loader(clients=7, seed=3)
        assert data.clients == 7
        held_out = math.ceil(0.2 * total)
        assert len(data.test["y"]) == held_out
        assert data.sizes.sum() == total - held_out
        assert data.train["x"].shape[1:] == (width,)
        assert data.train["x"].dtype == np.float32
        assert data.train["y"].dtype == np.int32

    def test_the_seed_decides_what_is_held_out(self):
        one, same, other = (digits(seed=seed).test["x"] for seed in (0, 0, 1))
        np.testing.assert_array_equal(one, same)
        assert not np.array_equal(one, other)

    def test_held_out_samples_are_not_trained_on(self):
        data = digits(clients=3)
        pooled = np.concatenate([data.client(i)["x"] for i in range(3)] + [data.test["x"]])
        published = load("digits")["x"].reshape(-1, 64) / 16
        np.testing.assert_array_equal(np.sort(pooled, axis=0), np.sort(published, axis=0))

    def test_table_is_standardised_by_its_training_part(self):
        data = breast_cancer(clients=1, dtype=np.float64)
        x = data.client(0)["x"]
        np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-12)
        np.testing.assert_allclose(x.std(axis=0), 1, rtol=1e-12)
        assert np.abs(data.test["x"].mean(axis=0)).max() > 1e-3

    def test_images_keep_their_shape_on_request(self, tmp_path):
        arrays = write_npz(tmp_path)
        data = mnist(2, data_dir=tmp_path, flat=False)
        assert data.test["x"].shape == (10, 28, 28, 1)
        np.testing.assert_allclose(data.test["x"][..., 0], arrays["x_test"] / 255, rtol=1e-6)
        flat = mnist(2, data_dir=tmp_path)
        np.testing.assert_array_equal(flat.test["x"], data.test["x"].reshape(10, 784))

    def test_images_are_normalised_on_request(self, tmp_path):
        arrays = write_npz(tmp_path)
        data = mnist(2, data_dir=tmp_path, normalize=(0.1307, 0.3081), dtype=np.float64)
        expected = (arrays["x_test"].reshape(10, -1) / 255 - 0.1307) / 0.3081
        np.testing.assert_allclose(data.test["x"], expected, rtol=1e-12)
        assert data.test["x"].dtype == np.float64

    def test_channels_are_normalised_one_by_one(self, tmp_path):
        rng = np.random.default_rng(0)
        batches = [images(rng, 2, (32, 32, 3)) for _ in range(6)]
        write_cifar_binary(tmp_path / "cifar-10-binary.tar.gz", batches[:5], batches[5])
        mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
        data = cifar10(2, data_dir=tmp_path, normalize=(mean, std), flat=False)
        np.testing.assert_allclose(
            data.test["x"], (batches[5][0] / 255 - np.array(mean)) / np.array(std), rtol=1e-5, atol=1e-6
        )

    def test_limit_takes_samples_with_their_labels(self, tmp_path):
        arrays = write_npz(tmp_path)
        data = mnist(2, data_dir=tmp_path, limit=7)
        assert data.sizes.sum() == 7
        assert len(data.test["y"]) == 7
        known = {
            image.tobytes(): label for image, label in zip(arrays["x_test"], arrays["y_test"], strict=True)
        }
        for x, y in zip(data.test["x"], data.test["y"], strict=True):
            assert known[np.rint(x * 255).astype(np.uint8).tobytes()] == y
        assert len(mnist(2, data_dir=tmp_path, limit=1000).test["y"]) == 10

    def test_fractions_reach_the_split(self):
        data = digits(clients=4, valid_fraction=0.25, server_fraction=0.3)
        assert len(data.server["y"]) == round(0.3 * 1437)
        assert data.valid_sizes.sum() + data.sizes.sum() == 1437 - len(data.server["y"])

    def test_partition_reaches_the_split(self):
        skewed, even = digits(partition=Dirichlet(0.1)), digits()
        assert np.ptp(skewed.sizes) > np.ptp(even.sizes) == 1

    def test_adult_can_be_split_by_group(self, tmp_path):
        write_adult(tmp_path)
        data = adult(3, ByKey("group"), data_dir=tmp_path)
        assert [int(data.client(i)["group"][0]) for i in range(3)] == [0, 1, 2]
        assert sorted(data.train) == ["group", "sex", "x", "y"]

    def test_series_become_a_regression(self, tmp_path):
        visits = write_wikimaths(tmp_path)
        data = wikimaths(2, data_dir=tmp_path, standardize=False)
        samples = [data.client(i) for i in range(2)] + [data.test]
        rows = np.concatenate([np.column_stack([part["x"], part["y"]]) for part in samples])
        assert len(data.test["y"]) == 4
        assert sorted(rows.tolist()) == sorted(visits.tolist())
        assert rows[:, -1].dtype == np.float32

    def test_series_are_standardised_by_their_training_part(self, tmp_path):
        write_wikimaths(tmp_path, pages=40)
        data = wikimaths(1, data_dir=tmp_path, test_fraction=0.25, dtype=np.float64)
        train = data.client(0)
        assert len(train["y"]) == 30
        for array in train.values():
            np.testing.assert_allclose(array.mean(axis=0), 0, atol=1e-12)
            np.testing.assert_allclose(array.std(axis=0), 1, rtol=1e-12)

    def test_a_constant_time_stays_finite(self, tmp_path):
        np.savez(
            tmp_path / "montevideo_bus.npz",
            visits=np.ones((10, 4), np.int16),
            edges=np.zeros((0, 2), np.int32),
            weights=np.zeros(0),
            bus_stop=np.arange(10),
            lon=np.arange(10),
            lat=np.arange(10),
        )
        data = montevideo_bus(2, data_dir=tmp_path)
        assert (data.train["x"] == 0).all()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"limit": 0}, "limit must be"),
            ({"limit": 0.5}, "limit must be"),
            ({"dtype": np.int32}, "floating type"),
            ({"normalize": 0.5}, "pair"),
            ({"normalize": (0.5, 0.0)}, "deviations > 0"),
        ],
    )
    def test_bad_options_are_refused(self, options, message):
        with pytest.raises(DataError, match=message):
            digits(**options)

    def test_bad_test_fraction_is_refused(self, tmp_path):
        write_wikimaths(tmp_path)
        with pytest.raises(DataError, match="test_fraction"):
            wikimaths(2, data_dir=tmp_path, test_fraction=1.0)

    def test_unknown_options_are_refused(self):
        with pytest.raises(TypeError, match="flatten"):
            digits(flatten=True)


@pytest.mark.slow
class TestRealData:
    def test_mnist(self, data_dir):
        arrays = load("mnist", data_dir)
        assert np.bincount(arrays["y_train"]).tolist() == [
            5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
        ]  # fmt: skip
        assert np.bincount(arrays["y_test"]).tolist() == [
            980,
            1135,
            1032,
            1010,
            982,
            892,
            958,
            1028,
            974,
            1009,
        ]
        assert arrays["y_train"][:5].tolist() == [5, 0, 4, 1, 9]
        pixels = arrays["x_train"] / 255
        assert (round(pixels.mean(), 4), round(pixels.std(), 4)) == (0.1307, 0.3081)

    def test_fashion_mnist(self, data_dir):
        arrays = load("fashion_mnist", data_dir)
        assert arrays["x_train"].shape == (60_000, 28, 28)
        assert np.bincount(arrays["y_train"]).tolist() == [6000] * 10
        assert np.bincount(arrays["y_test"]).tolist() == [1000] * 10
        assert arrays["y_train"][:5].tolist() == [9, 0, 0, 3, 0]
        assert fashion_mnist(4, data_dir=data_dir, limit=100).train["x"].shape == (100, 784)

    def test_cifar10(self, data_dir):
        arrays = load("cifar10", data_dir)
        assert arrays["x_train"].shape == (50_000, 32, 32, 3)
        assert np.bincount(arrays["y_train"]).tolist() == [5000] * 10
        assert arrays["y_train"][:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
        assert arrays["y_test"][:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
        means = arrays["x_train"].mean(axis=(0, 1, 2), dtype=np.float64) / 255
        assert means.round(4).tolist() == [0.4914, 0.4822, 0.4465]
        assert arrays["x_train"][0, 0, 0].tolist() == [59, 62, 63]  # the frog's first pixel

    def test_adult(self, data_dir):
        arrays = load("adult", data_dir)
        assert (len(arrays["y_train"]), len(arrays["y_test"])) == (32_561, 16_281)
        assert arrays["x_train"].shape == (32_561, 108)
        assert (arrays["y_train"].sum(), arrays["y_test"].sum()) == (7_841, 3_846)
        assert np.bincount(arrays["group_train"]).tolist() == [27_816, 3_124, 1_621]
        assert arrays["sex_train"].sum() == 21_790
        numeric = [i for i, name in enumerate(arrays["feature_names"]) if "=" not in name]
        assert len(numeric) == 6
        assert (np.delete(arrays["x_train"], numeric, axis=1).sum(axis=1) == 8).all()
        np.testing.assert_allclose(arrays["x_train"][:, numeric].mean(axis=0, dtype=np.float64), 0, atol=1e-6)
        np.testing.assert_allclose(arrays["x_train"][:, numeric].std(axis=0, dtype=np.float64), 1, rtol=1e-6)

    def test_adult_in_both_forms(self, data_dir, tmp_path):
        with gzip.open(data_dir / "adult.csv.gz", "rt") as file:
            _, *rows = (line.strip().replace(",", ", ") for line in file)
        (tmp_path / "adult.data").write_text("\n".join(rows[:32_561]) + "\n\n")
        (tmp_path / "adult.test").write_text(
            "|1x3 Cross validator\n" + "".join(f"{row}.\n" for row in rows[32_561:])
        )
        one, other = load("adult", data_dir), load("adult", tmp_path)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])

    def test_montevideo_bus(self, data_dir):
        arrays = load("montevideo_bus", data_dir)
        assert arrays["visits"].shape == (675, 744)
        assert arrays["edges"].shape == (690, 2)
        assert arrays["weights"][0] == 172.2
        data = montevideo_bus(10, data_dir=data_dir)
        assert data.train["x"].shape[1] == 743 > data.sizes.sum() == 337
