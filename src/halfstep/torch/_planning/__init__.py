"""Finds a policy by measuring the operations of a step, and whole steps."""
