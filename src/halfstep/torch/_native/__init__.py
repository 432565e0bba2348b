"""Kernels in C for what PyTorch's operations are slow at on a CPU; nothing needs them."""
