"""Gradient transformations for optax."""
