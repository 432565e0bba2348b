"""Float32 masters kept as a half-precision parameter and the bits that it lacks."""
