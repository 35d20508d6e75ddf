import hashlib
import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import utils

from datamodules import CIFAR10, CIFAR100, download
from dfl_lightning.errors import UserError

BOTH = pytest.mark.parametrize("cls", [CIFAR10, CIFAR100])


def write(folder: Path, cls: type[CIFAR10], records: int = 60) -> dict[str, np.ndarray]:
    """Every file of the data set, with so many random images each, which are returned by file."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    images = {}
    for name in (*cls.files.train, cls.files.test):
        images[name] = random.integers(0, 256, (records, 3, 32, 32), dtype=np.uint8)
        labels = np.arange(records, dtype=np.uint8)[:, None] % cls.num_classes
        groups = np.full((records, cls.files.label_bytes - 1), 19, dtype=np.uint8)
        np.concatenate([groups, labels, images[name].reshape(records, -1)], axis=1).tofile(folder / name)
    return images


@BOTH
@pytest.mark.parametrize("below", [True, False], ids=["as unpacked", "in the root itself"])
def test_the_binary_version_is_read_as_its_files_split_it(cls: type[CIFAR10], tmp_path: Path, below: bool) -> None:
    images = write(tmp_path / cls.files.folder if below else tmp_path, cls)
    data = cls(str(tmp_path)).load(4, 0)
    assert data.warning is None
    files = len(cls.files.train)
    assert f"({60 * files} training and 60 test images), dirichlet partition" in data.source
    assert data.train.images.dtype == data.test.images.dtype == torch.uint8
    np.testing.assert_array_equal(data.train.images.numpy(), np.concatenate([images[name] for name in cls.files.train]))
    np.testing.assert_array_equal(data.test.images.numpy(), images[cls.files.test])
    assert data.train.labels.tolist() == [k % cls.num_classes for k in range(60)] * files
    for split, least in ((data.train, 10), (data.test, 1)):
        assert sorted(torch.cat(split.indices).tolist()) == list(range(len(split.images)))
        assert min(len(rows) for rows in split.indices) >= least


@BOTH
def test_classes_are_named_where_the_file_of_names_is_there(cls: type[CIFAR10], tmp_path: Path) -> None:
    write(tmp_path, cls)
    assert cls(str(tmp_path)).load(2, 0).class_names == [str(label) for label in range(cls.num_classes)]
    names = [f"class_{label}" for label in range(cls.num_classes)]
    (tmp_path / cls.files.names).write_text("\n".join(names) + "\n\n")
    assert cls(str(tmp_path)).load(2, 0).class_names == names


def test_the_partition_is_chosen_and_seeded(tmp_path: Path) -> None:
    write(tmp_path, CIFAR10, 400)

    def spread(seed: int = 0, **options: object) -> tuple[float, str]:
        data = CIFAR10(str(tmp_path), **options).load(10, seed)  # type: ignore[arg-type]
        mixes = [torch.bincount(data.train.labels[rows], minlength=10) / len(rows) for rows in data.train.indices]
        return torch.stack(mixes).std(0).mean().item(), data.fingerprint()

    assert spread(beta=0.1)[0] > 2 * spread(beta=10.0)[0] > spread(partition="iid")[0]
    assert spread() == spread()
    assert spread() != spread(seed=1)


def test_a_node_is_measured_on_the_mix_that_it_trains_on(tmp_path: Path) -> None:
    write(tmp_path, CIFAR10, 2000)
    data = CIFAR10(str(tmp_path), beta=0.3).load(5, 0)
    for train, test in zip(data.train.indices, data.test.indices):
        mixes = [
            torch.bincount(split.labels[rows], minlength=10) / len(rows)
            for split, rows in ((data.train, train), (data.test, test))
        ]
        assert (mixes[0] - mixes[1]).abs().max() < 0.02


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda content: content[:-5], "must hold one or more whole records of"),
    "empty": (lambda content: b"", "has 0 bytes"),
    "no CIFAR at all": (lambda content: b"\x80\x04pickle", "has 8 bytes"),
    "label out of range": (lambda content: b"\xff\xff" + content[2:], "has the label 255, but labels lie between 0"),
}


@BOTH
@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_one_sentence(
    cls: type[CIFAR10], damage: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / cls.files.folder
    write(folder, cls)
    path = folder / cls.files.train[-1]
    path.write_bytes(damage(path.read_bytes()))
    for source in ("auto", "files"):
        with pytest.raises(UserError) as caught:
            cls(str(tmp_path), source=source).load(2, 0)  # type: ignore[arg-type]
        sentence = str(caught.value)
        assert message in sentence
        assert sentence.startswith(f"{path} ")
        assert sentence.endswith(
            f"remove {folder} and run: python -m datamodules.download {cls.name.lower()} --root {tmp_path}"
        )
        assert "\n" not in sentence


@BOTH
@pytest.mark.parametrize("which", ["train", "test"])
def test_a_missing_file_among_others_is_an_error(cls: type[CIFAR10], which: str, tmp_path: Path) -> None:
    write(tmp_path, cls)
    name = cls.files.test if which == "test" else cls.files.train[-1]
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing, though other files"):
        cls(str(tmp_path)).load(2, 0)


def test_a_folder_in_the_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, CIFAR10)
    (tmp_path / "test_batch.bin").unlink()
    (tmp_path / "test_batch.bin").mkdir()
    with pytest.raises(UserError, match=r"test_batch\.bin cannot be read"):
        CIFAR10(str(tmp_path)).load(2, 0)


@BOTH
def test_without_data_auto_renders_and_says_so(cls: type[CIFAR10], tmp_path: Path) -> None:
    root = tmp_path / "nothing"
    data = cls(str(root), rendered_samples=600).load(3, 0)
    assert data.warning is not None
    assert f"RENDERED, they are NOT {cls.name}: the folder {root} was not found" in data.warning
    assert f"python -m datamodules.download {cls.name.lower()} --root {root}" in data.warning
    assert "\n" not in data.warning
    assert f"not {cls.name}" in data.source
    assert data.train.images.shape == (600, 3, 32, 32)
    assert data.test.images.shape == (120, 3, 32, 32)
    assert "holds no files" in str(cls(str(tmp_path), rendered_samples=600).load(3, 0).warning)
    asked_for = cls(str(root), source="rendered", rendered_samples=600).load(3, 0)
    assert asked_for.warning is None
    assert asked_for.fingerprint() == data.fingerprint()
    with pytest.raises(UserError, match=r"data\.source is 'files', but the folder .* was not found; set data\.source"):
        cls(str(root), source="files").load(3, 0)


@pytest.mark.parametrize(("cls", "name"), [(CIFAR10, "batches.meta"), (CIFAR100, "meta")])
def test_pickles_are_not_opened_but_mentioned(cls: type[CIFAR10], name: str, tmp_path: Path) -> None:
    folder = tmp_path / cls.files.python_folder
    folder.mkdir()
    (folder / name).write_bytes(b"\x80\x04")
    warning = cls(str(tmp_path), rendered_samples=100).load(2, 0).warning
    assert f"holds {cls.name}'s Python version only, whose pickles are not read" in str(warning)


@BOTH
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("source", "leaf"),
        ("rendered_samples", 9),
        ("partition", "even"),
        ("beta", -0.5),
        ("min_samples", 0),
        ("batch_size", 0),
    ],
)
def test_a_wrong_option_is_refused_before_data_is_read(cls: type[CIFAR10], option: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"data\.{option} is '?{value}"):
        cls(**{option: value})  # type: ignore[arg-type]


def archive(path: Path, tmp_path: Path) -> str:
    """CIFAR-10's archive with few images; returns its checksum."""
    write(tmp_path / "cifar-10-batches-bin", CIFAR10, 10)
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tmp_path / "cifar-10-batches-bin", "cifar-10-batches-bin")
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for the network; gives the list of what was asked of it."""
    (tmp_path / "server").mkdir()
    source = tmp_path / "server" / "archive"
    md5 = archive(source, tmp_path / "server")
    monkeypatch.setitem(download.ARCHIVES, "cifar10", replace(CIFAR10.files, md5=md5))
    asked: list[str] = []

    def urlretrieve(url: str, filename: str) -> None:
        asked.append(url)
        Path(filename).write_bytes(source.read_bytes())

    monkeypatch.setattr(utils, "_get_redirect_url", lambda url, max_hops: url)
    monkeypatch.setattr(utils, "_urlretrieve", urlretrieve)
    return asked


def test_the_command_downloads_once_and_the_data_is_found(
    tmp_path: Path, server: list[str], capsys: pytest.CaptureFixture
) -> None:
    root = tmp_path / "root"
    for _ in range(2):
        assert download.main(["cifar10", "--root", str(root)]) == 0
    assert server == ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]
    assert f"set data.root to {root}" in capsys.readouterr().out
    assert [path.name for path in root.iterdir()] == ["cifar-10-batches-bin"]
    assert len(CIFAR10(str(root), source="files").load(2, 0).train.images) == 50


@pytest.mark.parametrize("failure", ["checksum", "connection", "archive"])
def test_a_download_that_fails_leaves_no_data(
    failure: str,
    tmp_path: Path,
    server: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def retrieve(url: str, filename: str) -> None:
        if failure == "connection":
            raise OSError("no route to host")
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz"):
            pass
        Path(filename).write_bytes(content.getvalue())

    monkeypatch.setattr(utils, "_urlretrieve", retrieve)
    if failure == "archive":  # of the right checksum, but without the folder
        monkeypatch.setattr(utils, "check_integrity", lambda path, md5=None: Path(path).exists())
    assert download.main(["cifar10", "--root", str(tmp_path / "root")]) == 1
    error = capsys.readouterr().err
    assert "cifar-10-binary.tar.gz could not be downloaded" in error
    assert "Traceback" not in error
    assert CIFAR10(str(tmp_path / "root")).find() is None
    assert not [path for path in (tmp_path / "root").iterdir() if path.is_dir()]
