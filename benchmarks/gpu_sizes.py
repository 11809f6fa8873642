"""The sizes of models, rows and matrix products in the timed parts of a measurement on a GPU: full, or tiny to try."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.gpu import LENGTH

_VARIANTS = {  # of single in bf16-true, and the package that each one needs
    "--activation_checkpointing full --activation_offload true": None,
    "--optimizer_states 8bit": None,
}
_COMPILED_VARIANTS = {  # these compile, or call kernels that are for GPUs alone
    "--compile true": None,
    "--attention flex_attention --compile true": None,
    "--attention flash_attention_2": "flash_attn",
    "--float8 true --compile true": "torchao",
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of the models that are trained for their speed, and of the matrix products.

    Attributes:
        options: added to a preset's, for smaller models.
        compiles: whether the first hour compiles the presets.
        variants: compared with the CPU in addition to the strategies.
        length: tokens in a row.
        long_length: tokens in a long row.
        products: rows and columns of the matrices that are multiplied.
        patience: how many times as long as planned a part may take.
    """

    options: str
    compiles: bool
    variants: Mapping[str, str | None]
    length: int
    long_length: int
    products: int
    patience: float


SIZES = {
    "full": Sizes(
        options="",
        compiles=True,
        variants={**_VARIANTS, **_COMPILED_VARIANTS},
        length=LENGTH,
        long_length=131_072,
        products=8192,
        patience=1,
    ),
    "tiny": Sizes(
        "--hidden_width 64 --num_layers 2 --num_heads 4 --num_key_value_heads 2 --intermediate_size 128"
        " --vocab_size 512",
        compiles=False,
        variants=_VARIANTS,
        length=64,
        long_length=512,
        products=128,
        patience=10,  # there it runs on a CPU that does other things as well
    ),
}
