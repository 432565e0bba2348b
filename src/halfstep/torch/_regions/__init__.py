"""What a region is made of: its boundary, its scale, its parameters and its optimizers."""
