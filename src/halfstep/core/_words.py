"""The plain words for operations, the same whatever the framework calls them."""

# A word, and what it stands for: the names that the frameworks' own operations have.
_NAMES = {
    "accumulate": "AccumulateGrad",
    "add": "addcmul addcdiv add_any foreach_add iadd radd",
    "attention": """
        scaled_dot_product_attention scaled_dot_product_flash_attention
        scaled_dot_product_flash_attention_for_cpu scaled_dot_product_efficient_attention
        scaled_dot_product_cudnn_attention scaled_dot_product_attention_math
        scaled_dot_product_fused_attention_overrideable flash_attention_forward
        efficient_attention_forward dot_product_attention
    """,
    "cast": "to to_copy convert_element_type",
    "conv": """
        convolution convolution_overrideable conv1d conv2d conv3d conv_transpose1d
        conv_transpose2d conv_transpose3d conv_general_dilated conv_transpose depthwise_conv
        separable_conv mkldnn_convolution cudnn_convolution miopen_convolution
        slow_conv2d_forward thnn_conv2d
    """,
    "divide": "div true_divide truediv foreach_div",
    "layer_norm": "native_layer_norm",
    "batch_norm": """
        native_batch_norm native_batch_norm_legit native_batch_norm_legit_no_training
        native_batch_norm_with_update batch_norm_with_update batch_norm_no_update
        cudnn_batch_norm miopen_batch_norm
    """,
    "group_norm": "native_group_norm",
    "rms_norm": "fused_rms_norm",
    "dropout": "native_dropout fused_dropout",
    "log_sigmoid": "log_sigmoid_forward",
    "matmul": """
        addmm addbmm baddbmm bmm mm mv addmv addr dot vdot outer ger linear dot_general einsum
        grouped_mm scaled_mm addmm_activation
    """,
    "multiply": "mul foreach_mul imul rmul",
    "negative": "neg",
    "nll_loss": "nll_loss_forward nll_loss2d_forward nll_loss_nd",
    "norm": "linalg_vector_norm linalg_norm foreach_norm frobenius_norm",
    "power": "pow integer_pow float_power",
    "sigmoid": "logistic",
    "subtract": "sub rsub foreach_sub isub",
    "sum": "reduce_sum",
    "max": "reduce_max amax",
    "min": "reduce_min amin",
    "where": "masked_fill select_n",
    "lstm": "lstm_cell thnn_fused_lstm_cell mkldnn_rnn_layer cudnn_rnn",
    "gru": "gru_cell thnn_fused_gru_cell",
}
_WORDS = {name: word for word, names in _NAMES.items() for name in names.split()}


def operation_word(name: str) -> str:
    """Returns the plain word for an operation.

    Args:
        name: What a framework calls it, with or without a namespace and an overload.

    Example:
        >>> [operation_word(each) for each in ("aten::addmm", "dot_general", "aten::exp_")]
        ['matmul', 'matmul', 'exp']
    """
    bare = name.rpartition("::")[2].partition(".")[0].strip("_")
    return _WORDS.get(bare, bare)
