"""How rules are carried out: from names of operations to kernels on the dispatcher.

`_families` and `_ops` say what operations there are, `_tables` what the rules mean for each on a
device, `_actions` what a rule does to the arguments of a call; `_kernels` puts that in front of
PyTorch's own kernels, and `_state` decides which rules are in force in a thread.
"""
