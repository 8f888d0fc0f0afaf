"""Where examples come from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from train.config.section import Count, CountOrZero, NonNegative, Positive, Section, Seed, Share


@dataclass(frozen=True)
class Digits(Section):
    """Scikit-learn's bundled handwritten digits: 1,797 grey images of 8 x 8 pixels."""

    source: Literal["digits"] = "digits"
    """Where the examples come from."""
    batch_size: Count = 64
    """Examples a training step."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Share of the images that is held out for testing, the same of every class."""
    split_seed: Seed = 0
    """Which images are held out."""
    max_shift: Annotated[int, Ge(0), Lt(8)] = 1
    """Training images are moved by up to that many pixels in each direction."""


@dataclass(frozen=True)
class Synthetic(Section):
    """Random images with random labels, for measuring: there is nothing to learn."""

    source: Literal["synthetic"] = "synthetic"
    """Where the examples come from."""
    batch_size: Count = 32
    """Examples a training step."""
    image_size: Count = 224
    """Height and width."""
    channels: Count = 3
    """Of each image."""
    classes: Count = 1000
    """How many labels there are."""
    examples: Count = 256
    """Training images; a quarter as many are held out."""


@dataclass(frozen=True)
class ImageFolder(Section):
    """Images in one folder a class, as torchvision's ImageFolder reads them."""

    source: Literal["image_folder"] = "image_folder"
    """Where the examples come from."""
    path: str = "."
    """The folder that holds train/ and val/ or test/, each with a folder a class."""
    held_out: Annotated[str, MinLen(1)] | None = None
    """The folder in it to test on; without it, val, or else test."""
    batch_size: Count = 64
    """Examples a training step."""
    image_size: Count = 224
    """Height and width of what the network sees."""
    crop: Literal["resized", "padded", "reflected", "centre"] = "resized"
    """Of training images: a random part, or the middle, moved over zeros, its mirror, or not."""
    min_area: Annotated[float, Gt(0), Le(1)] = 0.08
    """Smallest share of the image that a resized crop takes."""
    padding: CountOrZero = 4
    """Pixels by which padded and reflected crops are moved at most."""
    flip: bool = True
    """Mirror each training image with probability 1/2."""
    jitter: Share = 0.0
    """By how much saturation, brightness and contrast of training images vary; 0.4 is usual."""
    lighting: NonNegative = 0.0
    """Standard deviation of noise along the main colours of training images; 0.1 is usual."""
    cutout: CountOrZero = 0
    """Side of a square that is cut out of training images, in pixels."""
    mixup: NonNegative = 0.0
    """Mix pairs of training images, shares from Beta(mixup, mixup); 0: none are mixed."""
    resize: Count | None = None
    """Shorter side of test images before the middle is cut; without it, 8/7 of image_size."""
    crops: Literal[1, 2, 10] = 1
    """Of a test image: the middle; 2: that and its mirror image; 10: the corners too."""
    border: CountOrZero = 0
    """Pixels of its mirror image around a test image of which ten crops are made."""
    mean: tuple[Share, Share, Share] = (0.485, 0.456, 0.406)
    """Of each colour, 0 to 1; by default over ImageNet."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of each colour, that images are divided by."""
    workers: CountOrZero = 0
    """Processes that decode; 0: a thread of this one does."""
    keep: bool = False
    """Keep what is decoded in memory: each file is read once. Not with resized crops."""
    max_bad_fraction: Share = 0.01
    """Share of the files that may be unreadable; they are named and left out."""

    @property
    def shorter_side(self) -> int:
        """Of test images, from the middle of which the network's are cut."""
        return self.resize or round(self.image_size * 8 / 7)


@dataclass(frozen=True)
class ArrayFile(Section):
    """Images and labels as arrays in an .npz file, as Keras and MedMNIST have them."""

    source: Literal["arrays"] = "arrays"
    """Where the examples come from."""
    path: str = "data.npz"
    """An .npz file, or a folder with train.npz and, to test on, val.npz or test.npz."""
    images: Annotated[tuple[str, ...], MaxLen(2)] = ()
    """Arrays of images to train and to test on; without them, those with usual names."""
    labels: Annotated[tuple[str, ...], MaxLen(2)] = ()
    """Arrays of their labels; without them, those with usual names."""
    class_names: str | None = None
    """Array of the names of labels 0, 1, ...; without it, one with a usual name, if there is."""
    held_out: Annotated[str, MinLen(1)] | None = None
    """The part to test on; without it, val, or else test, or else test_share of the images."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Share of the images that is held out where no part is, the same of every class."""
    split_seed: Seed = 0
    """Which images are held out then."""
    axes: Literal["channels_last", "channels_first"] | None = None
    """Of images with channels: [N, H, W, C] or [N, C, H, W]; without it, last unless in doubt."""
    batch_size: Count = 64
    """Examples a training step."""
    crop: Literal["padded", "reflected", "centre"] = "centre"
    """Of training images: moved over zeros, moved over their mirror image, or not moved."""
    padding: CountOrZero = 4
    """Pixels by which padded and reflected crops are moved at most."""
    flip: bool = False
    """Mirror each training image with probability 1/2."""
    mean: Annotated[tuple[float, ...], MinLen(1)] = (0.0,)
    """Of each channel, or one of all; of bytes 0 to 1, of floating images as they are."""
    std: Annotated[tuple[Positive, ...], MinLen(1)] = (1.0,)
    """Standard deviation of each channel, or one of all, that images are divided by."""


@dataclass(frozen=True)
class HuggingFace(Section):
    """Images of a data set that the package datasets loads, from the hub or from a folder."""

    source: Literal["huggingface"] = "huggingface"
    """Where the examples come from."""
    path: str = "."
    """Its name on the hub (ylecun/mnist), a folder of images, or what save_to_disk wrote."""
    subset: Annotated[str, MinLen(1)] | None = None
    """Its configuration, where it has several."""
    revision: Annotated[str, MinLen(1)] | None = None
    """Its version on the hub: a commit, a branch or a tag; without it, the newest."""
    image: Annotated[str, MinLen(1)] | None = None
    """The column of images; without it, the only one."""
    label: Annotated[str, MinLen(1)] | None = None
    """The column of labels; without it, the only one of class labels."""
    held_out: Annotated[str, MinLen(1)] | None = None
    """The split to test on; without it, validation, val or test, or else test_share of train."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Share of the images that is held out where no split is, the same of every class."""
    split_seed: Seed = 0
    """Which images are held out then."""
    batch_size: Count = 64
    """Examples a training step."""
    image_size: Count = 224
    """Height and width of what the network sees."""
    crop: Literal["resized", "padded", "reflected", "centre"] = "resized"
    """Of training images: a random part, or the middle, moved over zeros, its mirror, or not."""
    min_area: Annotated[float, Gt(0), Le(1)] = 0.08
    """Smallest share of the image that a resized crop takes."""
    padding: CountOrZero = 4
    """Pixels by which padded and reflected crops are moved at most."""
    flip: bool = True
    """Mirror each training image with probability 1/2."""
    jitter: Share = 0.0
    """By how much saturation, brightness and contrast of training images vary; 0.4 is usual."""
    lighting: NonNegative = 0.0
    """Standard deviation of noise along the main colours of training images; 0.1 is usual."""
    cutout: CountOrZero = 0
    """Side of a square that is cut out of training images, in pixels."""
    resize: Count | None = None
    """Shorter side of test images before the middle is cut; without it, 8/7 of image_size."""
    mean: tuple[Share, Share, Share] = (0.485, 0.456, 0.406)
    """Of each colour, 0 to 1; by default over ImageNet."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of each colour, that images are divided by."""
    max_bad_fraction: Share = 0.01
    """Share of the images that may be unreadable; they are named and left out."""

    @property
    def shorter_side(self) -> int:
        """Of test images, from the middle of which the network's are cut."""
        return self.resize or round(self.image_size * 8 / 7)


@dataclass(frozen=True)
class SegmentationFolder(Section):
    """Images, each with a mask: an image of the same size whose values are labels."""

    source: Literal["segmentation_folder"] = "segmentation_folder"
    """Where the examples come from."""
    path: str = "."
    """Holds images/ and masks/, or train/ and val/ or test/, each with both."""
    held_out: Annotated[str, MinLen(1)] | None = None
    """The folder in it to test on; without it, val, or else test."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Share of the images that is held out, where path itself holds images/ and masks/."""
    split_seed: Seed = 0
    """Which images are held out then."""
    classes: Annotated[int, Ge(2), Le(255)] | None = None
    """How many labels there are, from 0; without it, the lines of classes.txt in path."""
    batch_size: Count = 16
    """Examples a training step."""
    image_size: Count = 512
    """Height and width of what the network sees; test images are fitted into it."""
    scale: tuple[Positive, Positive] = (0.5, 2.0)
    """Smallest and largest of training images; 1 is as they are tested."""
    flip: bool = True
    """Mirror each training image with probability 1/2."""
    jitter: Share = 0.0
    """By how much saturation, brightness and contrast of training images vary; 0.4 is usual."""
    lighting: NonNegative = 0.0
    """Standard deviation of noise along the main colours of training images; 0.1 is usual."""
    mean: tuple[Share, Share, Share] = (0.485, 0.456, 0.406)
    """Of each colour, 0 to 1; by default over ImageNet."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of each colour, that images are divided by."""
    workers: CountOrZero = 0
    """Processes that decode; 0: a thread of this one does."""
    max_bad_fraction: Share = 0.01
    """Share of the files that may be unreadable; they are named and left out."""


@dataclass(frozen=True)
class TextFile(Section):
    """A text, to be continued: each token is learned from those before it."""

    source: Literal["text_file"] = "text_file"
    """Where the examples come from."""
    path: str | None = None
    """A text file; without one, the sources of Python's standard library on this machine."""
    tokenizer: str | None = None
    """A tokenizer.json of the tokenizers library; without one, tokens are bytes."""
    batch_size: Count = 12
    """Rows a training step."""
    context: Annotated[int, Ge(2), Lt(2**31)] = 64
    """Tokens of a row."""
    separator: Annotated[str, MinLen(1)] | None = None
    """What stands between documents; then no row crosses from one to the next."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Share of the text, or of its documents, that is held out for testing."""
    split_seed: Seed | None = None
    """Which part is held out, drawn; without it, the last."""
