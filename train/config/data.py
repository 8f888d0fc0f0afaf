"""Data sources and their options."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from train.config.section import Count, CountOrZero, Fraction, NonNegative, Positive, Section, Seed


@dataclass(frozen=True)
class Digits(Section):
    """Scikit-learn's handwritten digits: 1,797 grayscale images of 8 x 8 pixels, no download."""

    source: Literal["digits"] = "digits"
    """Data source; --data.source NAME --help lists the fields of another one."""
    batch_size: Count = 64
    """Batch size."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Fraction of each class that is held out for testing."""
    split_seed: Seed = 0
    """Random seed of the train/test split."""
    max_shift: Annotated[int, Ge(0), Lt(8)] = 1
    """Random shift of training images, in pixels per direction."""


@dataclass(frozen=True)
class Synthetic(Section):
    """Random images with random labels, for measurements."""

    source: Literal["synthetic"] = "synthetic"
    """Data source; --data.source NAME --help lists the fields of another one."""
    batch_size: Count = 32
    """Batch size."""
    image_size: Count = 224
    """Image height and width."""
    channels: Count = 3
    """Channels of each image."""
    classes: Count = 1000
    """Number of classes."""
    examples: Count = 256
    """Number of training images; there are a quarter as many test images."""


@dataclass(frozen=True)
class Images(Section):
    """Options of images with labels, from folders or shards."""

    source: str = ""
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str | tuple[str, ...] = "."
    """Where the images are."""
    batch_size: Count = 64
    """Batch size."""
    image_size: Count = 224
    """Height and width of the network's input."""
    crop: Literal["resized", "padded", "reflected", "center"] = "resized"
    """Training crop: random resized, random with zero or reflection padding, or center."""
    min_area: Annotated[float, Gt(0), Le(1)] = 0.08
    """Smallest area of a random resized crop, as a fraction of the image."""
    padding: CountOrZero = 4
    """Padding of padded and reflected crops, in pixels per side."""
    flip: bool = True
    """Flip each training image horizontally with probability 1/2."""
    color_jitter: Fraction = 0.0
    """Strength of saturation, brightness and contrast jitter in training; 0.4 is common."""
    lighting: NonNegative = 0.0
    """Standard deviation of PCA color noise (AlexNet lighting) in training; 0.1 is common."""
    cutout: CountOrZero = 0
    """Side of the square that cutout removes from training images, in pixels; 0 is none."""
    rand_augment: CountOrZero = 0
    """RandAugment: number of random operations per training image; 2 is common, 0 is none."""
    magnitude: Annotated[int, Ge(0), Le(30)] = 9
    """Strength of RandAugment's operations, 0 to 30."""
    random_erasing: Annotated[float, Ge(0), Le(1)] = 0.0
    """Probability that a random rectangle of a training image is erased; 0.25 is common."""
    mixup: NonNegative = 0.0
    """Mixup strength alpha: mixing weights come from Beta(alpha, alpha); 0 is no mixup."""
    resize: Count | None = None
    """Shorter side of test images before the center crop; None is 8/7 of image_size."""
    crops: Literal[1, 2, 10] = 1
    """Test-time crops per image: 1 center crop, 2 with its horizontal flip, 10 for ten-crop."""
    border: CountOrZero = 0
    """Pixels of reflected border that are added to each test image before ten-crop."""
    mean: tuple[Fraction, Fraction, Fraction] = (0.485, 0.456, 0.406)
    """Mean of each color channel, 0 to 1, subtracted from images."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of each color channel, which images are divided by."""
    workers: CountOrZero = 0
    """Number of processes that decode images; 0 decodes in a thread of this process."""
    cache: bool = False
    """Keep decoded images in memory and read each file once; not with resized crops."""
    max_bad_fraction: Fraction = 0.01
    """Largest fraction of unreadable files to tolerate; they are reported and skipped."""
    max_pixels: Count = 2**30 // 12
    """Largest image to decode, in pixels; larger files are reported and skipped."""

    @property
    def shorter_side(self) -> int:
        """Shorter side of test images before the center crop."""
        return self.resize or round(self.image_size * 8 / 7)


@dataclass(frozen=True)
class ImageFolder(Images):
    """Images in one folder per class, as torchvision's ImageFolder reads them."""

    source: Literal["image_folder"] = "image_folder"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str = "."
    """Folder with one folder per class, or with train/ and val/ or test/ that hold them."""
    test_split: Annotated[str, MinLen(1)] | None = None
    """Folder of the test images; None is val, or test if there is no val."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Fraction of each class that is held out for testing if there is no test folder."""
    split_seed: Seed = 0
    """Random seed of that split."""
    balanced: bool = False
    """Draw training images of each class equally often."""
    repeats: Count = 1
    """Repeated augmentation: how often each training image is drawn in a row."""
    user: Literal["folder"] | None = None
    """Set to folder if users are folders, CLASS/USER/*.png; privacy is then per user."""
    examples_per_user: Count | None = None
    """Largest number of examples of a user per step; needed with user."""


@dataclass(frozen=True)
class ImageShards(Images):
    """Images in shards: tar files (WebDataset), Parquet, or ArrayRecord (TensorFlow Datasets)."""

    source: Literal["image_shards"] = "image_shards"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: Annotated[tuple[str, ...], MinLen(1)] = (".",)
    """Files, folders, patterns like 'train-{00..99}.tar', URLs (gs://, s3://), or tfds:NAME."""
    weights: tuple[Positive, ...] = ()
    """Share of each path in the batches; empty is by the number of images."""
    test_path: tuple[str, ...] = ()
    """Shards to test on; empty is those named val or test, or test_fraction of the images."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Fraction of each class that is held out for testing if there are no test shards."""
    split_seed: Seed = 0
    """Random seed of that split."""
    image: Annotated[str, MinLen(1)] | None = None
    """Extension (tar), column or feature of the image; None finds it by its type or usual names."""
    label: Annotated[str, MinLen(1)] | None = None
    """Extension (cls, json.FIELD), column or feature of the label; None is a usual one."""
    class_names: Annotated[str, MinLen(1)] | None = None
    """File of class names, one per line; None takes those that come with the shards."""


@dataclass(frozen=True)
class ArrayFile(Section):
    """Images and labels as arrays in an .npz file, as Keras and MedMNIST store them."""

    source: Literal["arrays"] = "arrays"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str = "data.npz"
    """An .npz file, or a folder with train.npz and optionally val.npz or test.npz."""
    images: Annotated[tuple[str, ...], MaxLen(2)] = ()
    """Names of the training and test image arrays; found by common names if empty."""
    labels: Annotated[tuple[str, ...], MaxLen(2)] = ()
    """Names of the training and test label arrays; found by common names if empty."""
    class_names: str | None = None
    """Name of the array of class names; None looks for a common name."""
    test_split: Annotated[str, MinLen(1)] | None = None
    """Split to test on; None is val or test, or test_fraction of train if there is neither."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Fraction of each class that is held out for testing if there is no test split."""
    split_seed: Seed = 0
    """Random seed of that split."""
    axes: Literal["channels_last", "channels_first"] | None = None
    """Layout of 4-D images: [N, H, W, C] or [N, C, H, W]; None infers it where it can."""
    batch_size: Count = 64
    """Batch size."""
    user: Annotated[str, MinLen(1)] | None = None
    """Name of the array of the training examples' user ids; privacy is then per user."""
    examples_per_user: Count | None = None
    """Largest number of examples of a user per step; needed with user."""
    crop: Literal["padded", "reflected", "center"] = "center"
    """Training crop: random with zero padding, random with reflection padding, or none."""
    padding: CountOrZero = 4
    """Padding of padded and reflected crops, in pixels per side."""
    flip: bool = False
    """Flip each training image horizontally with probability 1/2."""
    mean: Annotated[tuple[float, ...], MinLen(1)] = (0.0,)
    """Mean of each channel, or one for all; uint8 images are scaled to 0 to 1 first."""
    std: Annotated[tuple[Positive, ...], MinLen(1)] = (1.0,)
    """Standard deviation of each channel, or one for all, which images are divided by."""


@dataclass(frozen=True)
class HuggingFace(Section):
    """Images that Hugging Face's datasets library loads, from the hub or from disk."""

    source: Literal["huggingface"] = "huggingface"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str = "."
    """Name on the hub (ylecun/mnist), folder of images, or folder from save_to_disk."""
    subset: Annotated[str, MinLen(1)] | None = None
    """Configuration of the data set, if it has several."""
    revision: Annotated[str, MinLen(1)] | None = None
    """Revision on the hub: commit, branch or tag; None is the newest."""
    image: Annotated[str, MinLen(1)] | None = None
    """Name of the image column; None is the only one."""
    label: Annotated[str, MinLen(1)] | None = None
    """Name of the label column; None is the only column of class labels."""
    test_split: Annotated[str, MinLen(1)] | None = None
    """Split to test on; None is validation, val or test, or test_fraction of train."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Fraction of each class that is held out for testing if there is no test split."""
    split_seed: Seed = 0
    """Random seed of that split."""
    batch_size: Count = 64
    """Batch size."""
    user: Annotated[str, MinLen(1)] | None = None
    """Name of the column of user ids; privacy is then per user."""
    examples_per_user: Count | None = None
    """Largest number of examples of a user per step; needed with user."""
    image_size: Count = 224
    """Height and width of the network's input."""
    crop: Literal["resized", "padded", "reflected", "center"] = "resized"
    """Training crop: random resized, random with zero or reflection padding, or center."""
    min_area: Annotated[float, Gt(0), Le(1)] = 0.08
    """Smallest area of a random resized crop, as a fraction of the image."""
    padding: CountOrZero = 4
    """Padding of padded and reflected crops, in pixels per side."""
    flip: bool = True
    """Flip each training image horizontally with probability 1/2."""
    color_jitter: Fraction = 0.0
    """Strength of saturation, brightness and contrast jitter in training; 0.4 is common."""
    lighting: NonNegative = 0.0
    """Standard deviation of PCA color noise (AlexNet lighting) in training; 0.1 is common."""
    cutout: CountOrZero = 0
    """Side of the square that cutout removes from training images, in pixels; 0 is none."""
    rand_augment: CountOrZero = 0
    """RandAugment: number of random operations per training image; 2 is common, 0 is none."""
    magnitude: Annotated[int, Ge(0), Le(30)] = 9
    """Strength of RandAugment's operations, 0 to 30."""
    random_erasing: Annotated[float, Ge(0), Le(1)] = 0.0
    """Probability that a random rectangle of a training image is erased; 0.25 is common."""
    resize: Count | None = None
    """Shorter side of test images before the center crop; None is 8/7 of image_size."""
    mean: tuple[Fraction, Fraction, Fraction] = (0.485, 0.456, 0.406)
    """Mean of each color channel, 0 to 1, subtracted from images."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of each color channel, which images are divided by."""
    max_bad_fraction: Fraction = 0.01
    """Largest fraction of unreadable images to tolerate; they are reported and skipped."""
    max_pixels: Count = 2**30 // 12
    """Largest image to decode, in pixels; larger files are reported and skipped."""

    @property
    def shorter_side(self) -> int:
        """Shorter side of test images before the center crop."""
        return self.resize or round(self.image_size * 8 / 7)


@dataclass(frozen=True)
class SegmentationFolder(Section):
    """Images with segmentation masks: images of the same size whose values are labels."""

    source: Literal["segmentation_folder"] = "segmentation_folder"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str = "."
    """Folder with images/ and masks/, or as CamVid, Cityscapes, ADE20K or VOC are published."""
    test_split: Annotated[str, MinLen(1)] | None = None
    """Split to test on; None is val, or test if there is no val."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Fraction of images held out for testing if path is not split."""
    split_seed: Seed = 0
    """Random seed of that split."""
    classes: Annotated[int, Ge(2), Le(255)] | None = None
    """Number of classes; None counts mask_values or the class table."""
    class_table: Annotated[str, MinLen(1)] | None = None
    """File of class names, mask values and colors, or camvid, cityscapes or voc."""
    mask_values: Annotated[tuple[Annotated[int, Ge(0), Lt(2**16)], ...], MaxLen(255)] = ()
    """Value of each class in masks, as 0 255; empty is the class table's, or 0, 1, ..."""
    ignore: tuple[Annotated[int, Ge(0), Lt(2**16)] | str, ...] | None = None
    """Mask values, or names in the class table, that do not count; None is 255."""
    class_weights: Literal["median_frequency"] | None = None
    """Weights of classes in the loss; median_frequency favors rare ones."""
    batch_size: Count = 16
    """Batch size."""
    image_size: Count = 512
    """Height and width of the network's input; test images are resized to fit into it."""
    scale: tuple[Positive, Positive] = (0.5, 2.0)
    """Smallest and largest random scale of training images; 1 is the scale of test images."""
    flip: bool = True
    """Flip each training image horizontally with probability 1/2."""
    color_jitter: Fraction = 0.0
    """Strength of saturation, brightness and contrast jitter in training; 0.4 is common."""
    lighting: NonNegative = 0.0
    """Standard deviation of PCA color noise (AlexNet lighting) in training; 0.1 is common."""
    mean: tuple[Fraction, Fraction, Fraction] = (0.485, 0.456, 0.406)
    """Mean of each color channel, 0 to 1, subtracted from images."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of each color channel, which images are divided by."""
    workers: CountOrZero = 0
    """Number of processes that decode images; 0 decodes in a thread of this process."""
    max_bad_fraction: Fraction = 0.01
    """Largest fraction of unreadable files to tolerate; they are reported and skipped."""
    max_pixels: Count = 2**30 // 12
    """Largest image to decode, in pixels; larger files are reported and skipped."""


@dataclass(frozen=True)
class TextFile(Section):
    """A text file for a language model."""

    source: Literal["text_file"] = "text_file"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str | None = None
    """Text file; None reads the sources of Python's standard library."""
    tokenizer: str | None = None
    """A tokenizer.json of Hugging Face's tokenizers library; None uses bytes as tokens."""
    vocabulary: Annotated[int, Ge(2), Lt(2**31)] | None = None
    """Vocabulary size of the network; None is the tokenizer's. fnet memory then needs no text."""
    batch_size: Count = 12
    """Batch size, in rows."""
    context: Annotated[int, Ge(2), Lt(2**31)] = 64
    """Context length: tokens per row."""
    user: Literal["document"] | None = None
    """Set to document for privacy per document; needs separator."""
    examples_per_user: Count | None = None
    """Largest number of rows of a user per step; needed with user."""
    separator: Annotated[str, MinLen(1)] | None = None
    """Text between documents; rows then do not cross document boundaries."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Fraction of the text, or of its documents, that is held out for testing."""
    split_seed: Seed | None = None
    """Random seed of the held-out part; None holds out the end."""


@dataclass(frozen=True)
class ChatFile(Section):
    """Prompts with answers, chats or texts in a JSON lines or Parquet file, for fine-tuning."""

    source: Literal["chat_file"] = "chat_file"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str = "data.jsonl"
    """File of JSON lines, .parquet file (fnet-jax[parquet]), a folder of them, or a URL."""
    test_path: str | None = None
    """File or folder of test examples; None holds out test_fraction of path."""
    tokenizer: str | None = None
    """A tokenizer.json, or the folder of a model that holds one; None uses bytes as tokens."""
    chat_template: str | None = None
    """Jinja file; None is the template of the tokenizer's folder."""
    vocabulary: Annotated[int, Ge(2), Lt(2**31)] | None = None
    """Vocabulary size of the network; None is the tokenizer's. fnet memory then needs no data."""
    batch_size: Count = 8
    """Batch size, in rows."""
    context: Annotated[int, Ge(2), Lt(2**31)] = 512
    """Context length: tokens per row."""
    packing: bool = False
    """Pack several examples into a row; they do not see each other. Not with privacy."""
    long: Literal["cut", "truncate", "drop"] | None = None
    """Longer examples: cut into rows, truncate, or drop. None cuts texts and truncates others."""
    loss_on: Literal["answers", "last_answer", "all"] = "answers"
    """Tokens that are learned: answers, the last answer of each chat, or all tokens."""
    as_chat: bool = False
    """Write prompts and answers with the chat template, as a user's and an assistant's message."""
    prompt: Annotated[str, MinLen(1)] | None = None
    """Field of the prompt; None is prompt, question or instruction."""
    answer: Annotated[str, MinLen(1)] | None = None
    """Field of the answer; None is completion, answer, response or output."""
    text: Annotated[str, MinLen(1)] | None = None
    """Field of a plain text; None is text."""
    messages: Annotated[str, MinLen(1)] | None = None
    """Field of a chat's messages; None is messages or conversations."""
    user: Annotated[str, MinLen(1)] | None = None
    """Field of a user's id; privacy is then per user."""
    examples_per_user: Count | None = None
    """Largest number of rows of a user per step; needed with user."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Fraction of the examples that is held out for testing if there is no test_path."""
    split_seed: Seed | None = None
    """Random seed of the held-out examples; None holds out the last ones."""
