import builtins
import hashlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datamodules import FEMNIST, CelebA, download, hub
from datamodules.dealing import UserSplit
from dfl_lightning.errors import UserError

pa = pytest.importorskip("pyarrow", reason="pyarrow (of the extra 'hub') is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow (of the extra 'hub') is not installed")


def picture(array: np.ndarray) -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(array).save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": "image.png"}


def write_femnist(path: Path, rows: int = 40, seed: int = 0, **columns: list[Any]) -> np.ndarray:
    """A parquet file in the form of the Hub's, of four writers; returns its images."""
    images = np.random.default_rng(seed).integers(0, 256, (rows, 28, 28), dtype=np.uint8)
    content = {
        "image": [picture(image) for image in images],
        "writer_id": [f"f000{k % 4}_14" for k in range(rows)],
        "hsf_id": [0] * rows,
        "character": [k % 62 for k in range(rows)],
        **columns,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(content), path)
    return images


def convert(files: list[Path], name: str, root: Path) -> Path:
    source = download.SOURCES[name]
    hub.write_hub(root / "hub", download.decode_parquet(files, source), source.shape)
    return root / "hub"


def load(folder: Path) -> UserSplit:
    return hub.load_hub(folder, FEMNIST.shape, 62, "the command")


def test_parquet_files_become_the_readers_own_form(tmp_path: Path) -> None:
    paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    images = np.concatenate([write_femnist(path, seed=k) for k, path in enumerate(paths)])
    folder = convert(paths, "femnist", tmp_path)
    split = load(folder)
    np.testing.assert_array_equal(split.images[:, 0], images)
    assert split.labels.tolist() == [k % 62 for k in range(40)] * 2
    assert split.rows["f0001_14"].tolist() == [k for k in range(80) if k % 4 == 1]
    assert sorted(path.name for path in folder.iterdir()) == ["SHA256SUMS", "images.npy", "labels.npy", "users.json"]
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_the_datamodule_uses_the_download(tmp_path: Path) -> None:
    write_femnist(tmp_path / "0.parquet")
    convert([tmp_path / "0.parquet"], "femnist", tmp_path)
    for source in ("auto", "hub"):
        data = FEMNIST(str(tmp_path), source=source).load(4, 0)  # type: ignore[arg-type]
        assert data.warning is None
        assert "downloaded" in data.source
        assert [(len(train), len(test)) for train, test in zip(data.train.indices, data.test.indices)] == [(9, 1)] * 4


def test_an_image_that_a_writer_has_twice_is_kept_once(tmp_path: Path) -> None:
    same = picture(np.full((28, 28), 9, dtype=np.uint8))
    path = tmp_path / "0.parquet"
    write_femnist(path, 4, image=[same] * 4, writer_id=["a", "a", "b", "a"], character=[1, 1, 1, 2])
    split = load(convert([path], "femnist", tmp_path))
    assert {user: split.labels[rows].tolist() for user, rows in split.rows.items()} == {"a": [1, 2], "b": [1]}


def test_celeba_is_resized(tmp_path: Path) -> None:
    content = {
        "image": [picture(np.full((218, 178, 3), value, dtype=np.uint8)) for value in (10, 20, 30, 40)],
        "celeb_id": [7, 7, 8, 8],
        "Smiling": [True, False, True, False],
    }
    pq.write_table(pa.table(content), tmp_path / "0.parquet")
    convert([tmp_path / "0.parquet"], "celeba", tmp_path)
    data = CelebA(str(tmp_path), source="hub").load(2, 0)
    assert data.train.images.shape == (4, 3, 84, 84)
    assert data.train.images[:, 0, 40, 40].tolist() == [10, 20, 30, 40]
    assert data.train.labels.tolist() == [1, 0, 1, 0]
    assert sorted(data.users) == [["7"], ["8"]]


@pytest.mark.parametrize("name", ["labels.npy", "users.json", "images.npy", "SHA256SUMS"])
def test_damage_is_noticed(tmp_path: Path, name: str) -> None:
    write_femnist(tmp_path / "0.parquet")
    folder = convert([tmp_path / "0.parquet"], "femnist", tmp_path)
    assert hub.broken_file(folder) is None
    path = folder / name
    path.write_bytes(path.read_bytes()[:-9])
    assert hub.broken_file(folder) is not None
    with pytest.raises(UserError, match="is damaged; remove that folder and run: python -m datamodules"):
        FEMNIST(str(tmp_path)).load(2, 0)


def test_a_changed_pixel_is_noticed_by_the_full_check(tmp_path: Path) -> None:
    write_femnist(tmp_path / "0.parquet")
    folder = convert([tmp_path / "0.parquet"], "femnist", tmp_path)
    content = bytearray((folder / "images.npy").read_bytes())
    content[-1] ^= 1
    (folder / "images.npy").write_bytes(content)
    assert hub.broken_file(folder) == "images.npy"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"character": [62] * 40}, "has the label 62"),
        ({"character": [None] * 40}, "without an image, a user or a label"),
        ({"image": [{"bytes": b"no picture", "path": ""}] * 40}, "is not a JPEG or PNG"),
    ],
)
def test_rows_that_make_no_sense_leave_nothing_behind(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    write_femnist(tmp_path / "0.parquet", **columns)
    with pytest.raises(UserError, match=message):
        convert([tmp_path / "0.parquet"], "femnist", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["0.parquet"]


def test_a_file_that_is_not_parquet(tmp_path: Path) -> None:
    (tmp_path / "0.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(UserError, match="cannot be read as a parquet file"):
        convert([tmp_path / "0.parquet"], "femnist", tmp_path)


def test_checksums_of_downloaded_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"content")
    download.check_sha256(path, hashlib.sha256(b"content").hexdigest())
    download.check_sha256(path, None)
    with pytest.raises(UserError, match="does not match its published checksum"):
        download.check_sha256(path, "0" * 64)
    assert not path.exists()


class FakeHub:
    """Stands for huggingface_hub: one repository with one parquet file."""

    def __init__(self, sha256: str | None = None) -> None:
        self.sha256, self.calls = sha256, 0

    def HfApi(self) -> "FakeHub":
        return self

    def dataset_info(self, repository: str, files_metadata: bool) -> SimpleNamespace:
        lfs = SimpleNamespace(sha256=self.sha256) if self.sha256 else None
        names = ["README.md", "data/train-0.parquet"]
        return SimpleNamespace(sha="abc", siblings=[SimpleNamespace(rfilename=name, lfs=lfs) for name in names])

    def hf_hub_download(self, repository: str, name: str, repo_type: str, revision: str, local_dir: Path) -> str:
        self.calls += 1
        assert (repository, repo_type, revision) == ("flwrlabs/femnist", "dataset", "abc")
        write_femnist(local_dir / name)
        return str(local_dir / name)


def test_the_command_downloads_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fake = FakeHub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    for _ in range(2):
        assert download.main(["femnist", "--root", str(tmp_path)]) == 0
    assert fake.calls == 1
    assert f"set data.root to {tmp_path}" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


def test_the_command_refuses_a_wrong_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(sha256="0" * 64))
    assert download.main(["femnist", "--root", str(tmp_path)]) == 1
    assert "does not match its published checksum" in capsys.readouterr().err
    assert not (tmp_path / "hub").exists()


def test_without_a_connection_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    fake = FakeHub()
    monkeypatch.setattr(fake, "dataset_info", lost)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert download.main(["celeba", "--root", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "flwrlabs/celeba could not be downloaded (ConnectionError: no route to host)" in error
    assert "Traceback" not in error


def test_without_the_packages_the_command_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError("not there", name="huggingface_hub")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert download.main(["femnist", "--root", str(tmp_path)]) == 1
    assert "(huggingface_hub); run: pip install huggingface_hub pyarrow" in capsys.readouterr().err
