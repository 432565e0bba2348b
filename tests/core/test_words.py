import pytest

from halfstep.core import operation_word


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("aten::addmm", "matmul"),
        ("aten::mm", "matmul"),
        ("dot_general", "matmul"),
        ("matmul", "matmul"),
        ("aten::convolution", "conv"),
        ("conv_general_dilated", "conv"),
        ("aten::_to_copy", "cast"),
        ("convert_element_type", "cast"),
        ("aten::div.Tensor", "divide"),
        ("true_divide", "divide"),
        ("aten::masked_fill", "where"),
        ("select_n", "where"),
        ("aten::add_", "add"),
        ("add_any", "add"),
        ("aten::_softmax", "softmax"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::log1p", "log1p"),
        ("mylib::special", "special"),
    ],
)
def test_one_word_for_what_is_the_same(name, word):
    assert operation_word(name) == word


def test_a_word_is_its_own_word():
    words = [operation_word(name) for name in ("aten::mm", "aten::mul", "aten::_to_copy", "pow")]
    assert [operation_word(each) for each in words] == words
