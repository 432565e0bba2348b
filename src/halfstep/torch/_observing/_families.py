"""Which families of operations a module runs, as the rules call them."""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd

_FAMILIES: tuple[tuple[tuple[type[nn.Module], ...], tuple[str, ...]], ...] = (
    ((nn.Linear, nn.Bilinear), ("matmul",)),
    ((_ConvNd,), ("convolution",)),
    ((nn.MultiheadAttention,), ("attention", "matmul")),
    ((nn.RNNBase, nn.RNNCellBase), ("recurrent",)),
    ((_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm), ("normalisation",)),
    ((nn.Embedding, nn.EmbeddingBag), ("embedding",)),
    ((nn.Softmax, nn.LogSoftmax), ("softmax",)),
    ((_AvgPoolNd, _MaxPoolNd), ("pooling",)),
)
# Of a module that is somebody's own: what most parameters are for, and the rest.
_OTHER = ("matmul", "pointwise")


def families_of(module: nn.Module) -> tuple[str, ...]:
    """Returns the families of the operations that a module runs itself.

    Example:
        >>> families_of(nn.Conv2d(1, 1, 3))
        ('convolution',)
    """
    for kinds, families in _FAMILIES:
        if isinstance(module, kinds):
            return families
    return _OTHER if module._parameters else _OTHER[1:]
