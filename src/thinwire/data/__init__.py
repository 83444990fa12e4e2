"""The data room: (step, microbatch) -> token ids, a pure function of seed and corpus.

The coordinating process calls `prepare` once; every stage process calls `Corpus.open` on the
folder that `prepare` made and builds an `Order` on it. Two stages with the same corpus
fingerprint, sizes and seed therefore compute the same ids, and none need to travel.
"""

from thinwire.data.corpus import Corpus
from thinwire.data.order import Batch, Order, validation_batches
from thinwire.data.prepare import DataConfig, prepare
from thinwire.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "DataConfig",
    "Order",
    "Tokenizer",
    "prepare",
    "validation_batches",
]
