/* Splits float32 into bfloat16 and the 16 bits below it, and merges them, as _masters/_bits.py does;
   adds up squares as PyTorch does; counts numbers by exponent, as _observing/_counting.py does.

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

typedef void work(void *, void *, void *, int64_t start, int64_t stop);

/* Shares the numbers of several tensors evenly, as if one came after the other. */
static void share(work *some, void *const *first, void *const *second, void *const *third, const int64_t *counts, int64_t tensors, int64_t threads) {
    int64_t total = 0;
    for (int64_t one = 0; one < tensors; one++) total += counts[one];
#pragma omp parallel for schedule(static, 1) num_threads((int)threads) if (threads > 1)
    for (int64_t part = 0; part < threads; part++) {
        int64_t start = total * part / threads, stop = total * (part + 1) / threads;
        for (int64_t one = 0; one < tensors; start -= counts[one], stop -= counts[one], one++) {
            int64_t from = start > 0 ? start : 0, to = stop < counts[one] ? stop : counts[one];
            if (from < to) some(first[one], second[one], third[one], from, to);
        }
    }
}

static void split(void *masters, void *lows, void *remainders, int64_t start, int64_t stop) {
    const word *master = masters;
    half *low = lows, *remainder = remainders;
    for (int64_t at = start; at < stop; at++) {
        uint32_t bits = master[at];
        uint32_t rounded = (bits + 0x8000u) >> 16;
        /* Rounding may turn a NaN into an infinity or a zero; a quiet one stays what it is. */
        uint32_t quiet = (bits >> 16) | 0x40u;
        low[at] = (uint16_t)(is_nan(bits) ? quiet : rounded);
        remainder[at] = (uint16_t)bits;
    }
}

void halfstep_split(void *const *masters, void *const *lows, void *const *remainders, const int64_t *counts, int64_t tensors, int64_t threads) {
    share(split, masters, lows, remainders, counts, tensors, threads);
}

static void merge(void *lows, void *remainders, void *outs, int64_t start, int64_t stop) {
    const half *low = lows, *remainder = remainders;
    word *out = outs;
    for (int64_t at = start; at < stop; at++) {
        uint32_t base = (uint32_t)low[at] << 16;
        uint32_t bits = base + (uint32_t)(int32_t)(int16_t)remainder[at];
        /* Only a stale remainder leads from a number to NaN. */
        out[at] = is_nan(bits) ? base : bits;
    }
}

void halfstep_merge(void *const *lows, void *const *remainders, void *const *outs, const int64_t *counts, int64_t tensors, int64_t threads) {
    share(merge, lows, remainders, outs, counts, tensors, threads);
}

enum { LANES = 8, TOGETHER = 4 };

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef float some_floats __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint16_t some_halves __attribute__((vector_size(2 * LANES), aligned(1), may_alias));

static inline lanes numbers_at(const void *values, int64_t at, int wide) {
    if (wide) return *(const some_floats *)((const float *)values + at);
    some_halves low = *(const some_halves *)((const half *)values + at);
    return (lanes)(__builtin_convertvector(low, words) << 16);
}

static inline float number_at(const void *values, int64_t at, int wide) {
    union { uint32_t bits; float number; } both = {(uint32_t)((const half *)values)[at] << 16};
    return wide ? ((const float *)values)[at] : both.number;
}

/* Adds up in the order of PyTorch's norm of float32, for the same bits: lane by lane, then the
   lanes, then what is left. */
static inline float squares(const void *values, int64_t at, int64_t count, lanes sums, int wide) {
    for (; at + LANES <= count; at += LANES) {
        lanes numbers = numbers_at(values, at, wide);
        sums += numbers * numbers;
    }
    float sum = sums[0];
    for (int lane = 1; lane < LANES; lane++) sum += sums[lane];
    for (; at < count; at++) sum += number_at(values, at, wide) * number_at(values, at, wide);
    return sum;
}

/* An order leaves each sum waiting for the one before, so several tensors go side by side. */
static inline void squares_of(const void *const *tensors, const int64_t *counts, float *sums, int wide) {
    lanes found[TOGETHER] = {0};
    int64_t at = 0;
    for (; at + LANES <= counts[TOGETHER - 1]; at += LANES)
        for (int one = 0; one < TOGETHER; one++) {
            lanes numbers = numbers_at(tensors[one], at, wide);
            found[one] += numbers * numbers;
        }
    for (int one = 0; one < TOGETHER; one++)
        sums[one] = squares(tensors[one], at, counts[one], found[one], wide);
}

static void squares_from(int64_t first, const void *const *tensors, const int64_t *counts, float *sums, int64_t count, int wide) {
    lanes none = {0};
    if (first + TOGETHER <= count && wide) squares_of(tensors + first, counts + first, sums + first, 1);
    else if (first + TOGETHER <= count) squares_of(tensors + first, counts + first, sums + first, 0);
    else for (; first < count; first++) sums[first] = squares(tensors[first], 0, counts[first], none, wide);
}

/* The largest tensors come first. */
void halfstep_squares(const void *const *tensors, const int64_t *counts, int64_t count, int64_t threads, float *sums, int wide) {
#pragma omp parallel for schedule(dynamic) num_threads((int)threads) if (threads > 1)
    for (int64_t first = 0; first < count; first += TOGETHER)
        squares_from(first, tensors, counts, sums, count, wide);
}

enum { BLOCK = 4096, TABLES = 8, FIELDS = 256, NANS = 256, ZEROS = 257, TINY = 384, LARGEST = 407, DIGITS = 23 };

static const uint32_t ENDLESS = 0x7f800000u;

/* The bits of the magnitude of a number in float32. */
static inline uint32_t magnitude(const void *values, int64_t at, int wide) {
    return wide ? ((const word *)values)[at] & 0x7fffffffu : (((const half *)values)[at] & 0x7fffu) << 16;
}

/* Numbers often have the exponent of the one before, and adding to a count that was just written
   waits for it, so several tables take turns. */
static inline void count_fields(const uint32_t *bits, int64_t count, uint32_t *fields) {
    uint32_t tables[TABLES][FIELDS] = {{0}};
    int64_t at = 0;
    for (; at + TABLES <= count; at += TABLES)
        for (int table = 0; table < TABLES; table++) tables[table][bits[at + table] >> DIGITS]++;
    for (; at < count; at++) tables[0][bits[at] >> DIGITS]++;
    for (int field = 0; field < FIELDS; field++) {
        fields[field] = 0;
        for (int table = 0; table < TABLES; table++) fields[field] += tables[table][field];
    }
}

/* Each loop is of a kind that a compiler makes one of many numbers at a time. */
static inline void count_block(const uint32_t *bits, int64_t count, int64_t *row) {
    uint32_t fields[FIELDS], zeros = 0, nans = 0, largest = 0;
    count_fields(bits, count, fields);
    for (int64_t at = 0; at < count; at++) zeros += bits[at] == 0;
    if (fields[FIELDS - 1])
        for (int64_t at = 0; at < count; at++) nans += bits[at] > ENDLESS;
    for (int64_t at = 0; at < count; at++) {
        uint32_t finite = bits[at] & -(uint32_t)(bits[at] < ENDLESS);
        largest = largest > finite ? largest : finite;
    }
    if (fields[0] > zeros)
        for (int64_t at = 0; at < count; at++)
            if (bits[at] && bits[at] >> DIGITS == 0) row[TINY + 31 - __builtin_clz(bits[at])]++;
    for (int field = 1; field < FIELDS; field++) row[field] += fields[field];
    row[FIELDS - 1] -= nans;
    row[NANS] += nans;
    row[ZEROS] += zeros;
    row[LARGEST] = row[LARGEST] > largest ? row[LARGEST] : largest;
}

static inline void count_all(const void *values, int64_t count, int64_t *row, int wide) {
    uint32_t bits[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t some = count - start < BLOCK ? count - start : BLOCK;
        for (int64_t at = 0; at < some; at++) bits[at] = magnitude(values, start + at, wide);
        count_block(bits, some, row);
    }
}

void halfstep_exponents(const void *values, int64_t count, int64_t *row, int wide) {
    if (wide) count_all(values, count, row, 1);
    else count_all(values, count, row, 0);
}
