"""The data room: (step, microbatch) -> token ids or images, a pure function of seed and data.

The coordinator calls `prepare` or `prepare_images` once; every stage process opens the
folder that it made and builds an `Order` or `ImageOrder` on it. Two stages with the same
fingerprint, sizes and seed therefore compute the same batches, and none need to travel.

Batches of images are in `thinwire.data.image_batches`, apart from the rest, which needs no torch.
"""

from thinwire.data.corpus import Corpus
from thinwire.data.images import ImageSet, prepare_images
from thinwire.data.order import Batch, Order, Validation
from thinwire.data.prepare import DataConfig, prepare
from thinwire.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "DataConfig",
    "ImageSet",
    "Order",
    "Tokenizer",
    "Validation",
    "prepare",
    "prepare_images",
]
