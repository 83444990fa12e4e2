"""Models in stages whose cuts pass tokens one by one, each with a codec of its own."""

BY_TOKEN = [
    {"codec__forward": "fp64"},
    {"codec__forward": "int8(group=8)+ef21", "boundary__mode": "subspace", "boundary__rank": 12},
    {"codec__forward": "int8+zstd", "boundary__mode": "reparam", "boundary__rank": 12},
    {"codec__forward": "bf16", "boundary__mode": "projected", "boundary__rank": 12,
     "boundary__anchor": "per-stage", "boundary__table": 5},
]  # fmt: skip
