"""The words for operations, the same on every backend."""

from halfstep.keras._diagnosing._backend import here

# The functions of Keras' backends that go by another name than what they do.
_FUNCTIONS = {
    "conv_transpose": "conv",
    "depthwise_conv": "conv",
    "dot_product_attention": "attention",
    "separable_conv": "conv",
    "true_divide": "divide",
}


# Others run in them, and have been noted where they could be seen.
CONTAINERS = ("checkpoint", "function", "remat2")
# They hand out memory that nobody has written to yet.
UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def function_word(name: str) -> str:
    """Returns the word for a function of Keras' backend.

    Example:
        >>> function_word("depthwise_conv"), function_word("matmul")
        ('conv', 'matmul')
    """
    return _FUNCTIONS.get(name, name)


def operation_word(name: str) -> str:
    """Returns the word for what the backend itself calls an operation.

    Example:
        >>> operation_word("exp")
        'exp'
    """
    word: str = here().WORDS.get(name, name.strip("_").lower())
    return "function" if word.startswith("inference_") else word
