import numpy as np
import pytest

from datamodules import FEMNIST, CelebA
from datamodules.characters import render_characters
from datamodules.dealing import UserData
from datamodules.faces import render_faces


def draw(kind: str, num_users: int, seed: int, samples: int = 30) -> UserData:
    if kind == "characters":
        return render_characters(num_users, samples, FEMNIST.class_names, seed)
    return render_faces(num_users, samples, seed)


@pytest.mark.parametrize(("kind", "shape"), [("characters", FEMNIST.shape), ("faces", CelebA.shape)])
def test_drawings_depend_on_the_seed_alone(kind: str, shape: tuple[int, int, int]) -> None:
    first, again, other = draw(kind, 3, 1), draw(kind, 3, 1), draw(kind, 3, 2)
    assert first.train.images.dtype == np.uint8
    assert first.train.images.shape[1:] == shape
    np.testing.assert_array_equal(first.train.images, again.train.images)
    assert first.train.labels.tolist() == again.train.labels.tolist()
    assert first.train.images.tobytes() != other.train.images.tobytes()


@pytest.mark.parametrize("kind", ["characters", "faces"])
def test_more_users_leave_the_first_ones_as_they_are(kind: str) -> None:
    few, many = draw(kind, 2, 1), draw(kind, 4, 1)
    np.testing.assert_array_equal(few.train.images, many.train.images[: len(few.train.images)])
    assert list(many.train.rows)[:2] == list(few.train.rows)


@pytest.mark.parametrize("kind", ["characters", "faces"])
def test_each_user_has_a_split_of_their_own(kind: str) -> None:
    data = draw(kind, 4, 1)
    sizes = [len(rows) for rows in data.train.rows.values()]
    assert len(set(sizes)) > 1  # users have unequally many images
    for user, rows in data.test.rows.items():
        total = len(rows) + len(data.train.rows[user])
        assert len(rows) == max(1, round(0.1 * total))
        assert not set(rows) & set(data.train.rows[user])


def test_characters_are_black_on_white_and_stay_inside_the_image() -> None:
    images = draw("characters", 20, 1).train.images
    assert (images == 255).mean() > 0.8
    ink = (images < 128).mean(axis=(1, 2, 3))
    assert ink.min() > 0
    assert 0.02 < ink.mean() < 0.08  # real FEMNIST: 0.04
    assert np.median(images.min(axis=(1, 2, 3))) < 40
    border = np.concatenate([images[:, :, [0, -1]].reshape(-1), images[:, :, :, [0, -1]].reshape(-1)])
    assert (border == 255).mean() > 0.99


def test_writers_differ_more_than_samples_of_one_writer() -> None:
    data = draw("characters", 6, 1, samples=600)
    zero = data.train.labels == 0
    means = []
    for rows in data.train.rows.values():
        mine = data.train.images[rows[zero[rows]]].astype(float)
        half = len(mine) // 2
        means.append((mine[:half].mean(0), mine[half:].mean(0)))
    within = np.mean([np.abs(first - second).mean() for first, second in means])
    between = np.mean([np.abs(a[0] - b[0]).mean() for i, a in enumerate(means) for b in means[:i]])
    assert between > 1.5 * within


def test_all_characters_occur_and_digits_more_often() -> None:
    labels = draw("characters", 5, 1, samples=600).train.labels
    assert set(labels.tolist()) == set(range(62))
    assert 0.45 < (labels < 10).mean() < 0.75


def test_faces_smile_or_not() -> None:
    data = draw("faces", 4, 1)
    assert set(data.train.labels.tolist()) == {0, 1}
