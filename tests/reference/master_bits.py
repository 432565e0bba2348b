"""Float32 as a half-precision number and a remainder, in numpy and one rule after the other."""

import numpy


def as_bits(values):
    return values.view(numpy.int32).astype(numpy.int64)


def split_bfloat16(master):
    """Returns the bits of the nearest bfloat16, of two such the larger, and the rest."""
    bits = as_bits(master)
    sign, size = bits < 0, bits & 0x7FFFFFFF
    below, rest = size >> 16, size & 0xFFFF
    upper = numpy.where(rest >= 0x8000, below + 1, below)
    upper = numpy.where(numpy.isnan(master), 0x7FC0, upper)
    low = numpy.where(sign, upper - 0x8000, upper).astype(numpy.int16)
    return low, numpy.where(rest >= 0x8000, rest - 0x10000, rest).astype(numpy.int16)


def split_float16(master):
    """Returns the nearest float16, the rest, and of each element whether the rest is all of it."""
    with numpy.errstate(over="ignore"):
        low = master.astype(numpy.float16)
    rest = as_bits(master) - as_bits(low.astype(numpy.float32))
    kept = (rest >= -(2**15)) & (rest < 2**15) & numpy.isfinite(low)
    return low, rest.astype(numpy.int16), kept | ~numpy.isfinite(master)


def merge(low, remainder):
    """Returns the master of a widened parameter, which is kept if the sum is no number."""
    bits = (as_bits(low) + remainder).astype(numpy.int32)
    out = bits.view(numpy.float32)
    return numpy.where(numpy.isnan(low) | numpy.isnan(out), low, out)
