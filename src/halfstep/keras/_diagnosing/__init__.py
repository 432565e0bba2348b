"""The parts of `diagnose`: what is noted while a model runs, and what to write instead."""
