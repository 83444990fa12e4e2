"""The data room: (step, microbatch) -> token ids, a pure function of seed and data.

The coordinator calls `prepare` once; every stage process opens the folder that it made and builds
an `Order` on it. Two stages with the same fingerprint, sizes and seed therefore compute the same
batches, and none need to travel.
"""

from thinwire.data.corpus import Corpus
from thinwire.data.order import Batch, Order, Validation
from thinwire.data.prepare import DataConfig, prepare
from thinwire.data.tokenizer import Tokenizer
