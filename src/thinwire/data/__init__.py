"""The data room: (step, microbatch) -> token ids, a pure function of seed and data.

`prepare` makes a corpus once; every stage opens it and builds an `Order` on it. With the same
fingerprint, sizes and seed they compute the same batches, and none need to travel.
"""

from thinwire.data.corpus import Corpus
from thinwire.data.order import Batch, Order, Validation
from thinwire.data.prepare import DataConfig, prepare
from thinwire.data.tokenizer import Tokenizer
