"""The parts of `diagnose`: runs of a program equation by equation, and what is told of them."""
