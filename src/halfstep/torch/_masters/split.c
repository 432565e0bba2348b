/* Splits float32 into bfloat16 and the 16 bits below it, merges them, and adds up the squares of
   bfloat16 numbers, as _bits.py does.

   Plain C that knows nothing of PyTorch. Integers wrap around, and memory need not be aligned. */

#include <stdint.h>

typedef uint16_t __attribute__((aligned(1), may_alias)) half;
typedef uint32_t __attribute__((aligned(1), may_alias)) word;

static inline int is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

/* How many threads run, 0 if this was built without OpenMP and only one ever does. */
int64_t halfstep_threads(int64_t threads) {
    int64_t running = 0;
#ifdef _OPENMP
#pragma omp parallel num_threads((int)threads) reduction(+ : running)
    running += 1;
#endif
    return running;
}

void halfstep_split(const word *master, half *low, half *remainder, int64_t count, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t at = 0; at < count; at++) {
        uint32_t bits = master[at];
        uint32_t rounded = (bits + 0x8000u) >> 16;
        /* Rounding may turn a NaN into an infinity or a zero; a quiet one stays what it is. */
        uint32_t quiet = (bits >> 16) | 0x40u;
        low[at] = (uint16_t)(is_nan(bits) ? quiet : rounded);
        remainder[at] = (uint16_t)bits;
    }
}

void halfstep_merge(const half *low, const half *remainder, word *out, int64_t count, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t at = 0; at < count; at++) {
        uint32_t base = (uint32_t)low[at] << 16;
        uint32_t bits = base + (uint32_t)(int32_t)(int16_t)remainder[at];
        /* Only a stale remainder leads from a number to NaN. */
        out[at] = is_nan(bits) ? base : bits;
    }
}

static inline float widened(half value) {
    union { uint32_t bits; float number; } both = {(uint32_t)value << 16};
    return both.number;
}

enum { LANES = 8 };

/* Adds up in the order of PyTorch's norm of float32, for the same bits: lane by lane, then the
   lanes, then what is left. */
static float squares(const half *values, int64_t count) {
    float sums[LANES] = {0};
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES)
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += widened(values[at + lane]) * widened(values[at + lane]);
    for (int lane = 1; lane < LANES; lane++) sums[0] += sums[lane];
    for (; at < count; at++) sums[0] += widened(values[at]) * widened(values[at]);
    return sums[0];
}

/* An order leaves nothing to share within a tensor, so each thread does whole ones. */
void halfstep_squares(const half *const *tensors, const int64_t *counts, float *sums, int64_t count, int64_t threads) {
#pragma omp parallel for schedule(dynamic) num_threads((int)threads) if (threads > 1)
    for (int64_t at = 0; at < count; at++) sums[at] = squares(tensors[at], counts[at]);
}
