"""What is seen of a training step while it runs, counted on the device."""
