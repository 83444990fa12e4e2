"""Hugging Face folders, in and out; importing this registers our model class with transformers.

Most models need none of it: dense, subspace and reparam checkpoints export as an ordinary Llama.
Those whose cuts do not fold need `import thinwire.hf` before `AutoModelForCausalLM` opens them.
"""

import contextlib

with contextlib.suppress(ImportError):  # folders are written and read without transformers too
    from thinwire.hf.modeling import register

    register()
