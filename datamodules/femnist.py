"""Handwritten characters by writer."""

from string import ascii_lowercase, ascii_uppercase, digits

from datamodules.dealing import UserData
from datamodules.leaf import LeafFiles, encode_pixels, read_leaf
from datamodules.sources import UserDataModule


class FEMNIST(UserDataModule):
    """Handwritten digits and letters, 62 classes, 1x28x28, black (0) on white (1); a node holds one or more writers."""

    num_classes = 62
    name = "FEMNIST"
    shape = (1, 28, 28)
    class_names = list(digits + ascii_uppercase + ascii_lowercase)

    def read(self, files: LeafFiles, seed: int) -> UserData:
        return read_leaf(files, encode_pixels(self.shape), self.num_classes, seed)

    def render(self, num_users: int, seed: int) -> UserData:
        from datamodules.characters import render_characters

        return render_characters(num_users, self.rendered_samples, self.class_names, seed)
