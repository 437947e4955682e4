/* 16-bit halves, 8-bit levels and the largest values, each in one pass. C11, for any compiler that vectorises.

   The bits are those of the torch operations in truncate.py, linear.py and top_k.py. So: no fused multiply-add
   (-ffp-contract=off), no -ffast-math, and magnitudes are compared as integers, which orders infinities and NaNs last.
   Nothing is allocated. Memory of values and messages may begin at any byte. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float f32 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint16_t u16 __attribute__((aligned(1), may_alias));

enum { TILE = 4096, CHUNK = 65536 }; /* values that stay in the first cache, and in the second */
enum { LINE = 64, BINS = 2048 }; /* values that are compared at a time; numbers of 11 bits */

#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u
#define NOT_A_NUMBER 0x7fc00000u
#define SMALLEST 0x04000000u /* 2**-119, groups.SMALLEST */
#define LEVELS 127.0f
#define POWER 128.0f
#define ROUNDS 12582912.0f /* 3 * 2**22: in a float of this size the last bit is worth 1 */

static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float number_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline size_t least(size_t one, size_t other) { return one < other ? one : other; }
static inline uint32_t magnitude_of(uint32_t bits) { return bits & MAGNITUDE; }

/* -- truncation: the high half of each value ------------------------------------------------------------------- */

static inline void halve(const f32 *restrict values, const u16 *restrict added, u16 *restrict out, size_t numel,
                         int sum, int nearest)
{
    for (size_t i = 0; i < numel; i++) {
        float x = values[i];
        if (sum)
            x += number_of((uint32_t)added[i] << 16);
        uint32_t bits = bits_of(x);
        if (nearest)
            bits = magnitude_of(bits) > INFINITE ? 0xffff0000u : bits + 0x7fff + ((bits >> 16) & 1);
        out[i] = (uint16_t)(bits >> 16);
    }
}

/* out <- halves of the values, or of their sums with the halves of a message (`added`, or NULL). */
void workbench_halve(const f32 *values, const u16 *added, u16 *out, size_t numel, int nearest)
{
    if (added && nearest)
        halve(values, added, out, numel, 1, 1);
    else if (added)
        halve(values, added, out, numel, 1, 0);
    else if (nearest)
        halve(values, added, out, numel, 0, 1);
    else
        halve(values, added, out, numel, 0, 0);
}

static inline void widen(const u16 *restrict halves, f32 *restrict out, size_t numel, int add)
{
    for (size_t i = 0; i < numel; i++) {
        float x = number_of((uint32_t)halves[i] << 16);
        out[i] = add ? out[i] + x : x;
    }
}

/* out <- the values of halves, or out + these. */
void workbench_widen(const u16 *halves, f32 *out, size_t numel, int add)
{
    if (add)
        widen(halves, out, numel, 1);
    else
        widen(halves, out, numel, 0);
}

/* -- levels: one scale for each group, then one byte for each value --------------------------------------------- */

/* q / 127 * M by q + q / 127 and factor = M / 128, as linear._decode */
static inline float decoded(int8_t level, float factor)
{
    float q = level;
    return (q + q * (float)(1 / 127.0)) * factor;
}

/* Return the largest magnitude; keep the sums in `kept`, if asked. */
static inline int32_t largest(const f32 *restrict values, const int8_t *restrict levels, float factor,
                              f32 *restrict kept, size_t numel, int sum, int keep)
{
    int32_t found = 0;
    for (size_t i = 0; i < numel; i++) {
        float x = values[i];
        if (sum)
            x += decoded(levels[i], factor);
        if (keep)
            kept[i] = x;
        int32_t here = (int32_t)magnitude_of(bits_of(x));
        found = here > found ? here : found;
    }
    return found;
}

/* out <- round(127 x / M), where scale = 127 / M: the level is in the last byte of the sum. */
static inline void rounded(const f32 *restrict values, const int8_t *restrict levels, float factor, float scale,
                           int8_t *restrict out, size_t numel, int sum)
{
    for (size_t i = 0; i < numel; i++) {
        float x = values[i];
        if (sum)
            x += decoded(levels[i], factor);
        out[i] = (int8_t)bits_of(x * scale + ROUNDS);
    }
}

static inline void quantise_group(const f32 *values, const int8_t *levels, float factor, u32 *scale, int8_t *out,
                                  size_t numel, int sum)
{
    f32 sums[TILE];
    int keep = sum && numel <= TILE;
    int32_t found = 0;
    if (keep)
        found = largest(values, levels, factor, sums, numel, 1, 1);
    else
        for (size_t start = 0; start < numel; start += CHUNK) {
            size_t size = least(CHUNK, numel - start);
            int32_t here = largest(values + start, levels + start, factor, sums, size, sum, 0);
            found = here > found ? here : found;
        }
    uint32_t bits = (uint32_t)found >= INFINITE ? NOT_A_NUMBER : (uint32_t)found < SMALLEST ? SMALLEST : (uint32_t)found;
    *scale = bits;
    float over = 1 / number_of(bits) * LEVELS; /* as torch computes 127 / M */
    if (bits == NOT_A_NUMBER)
        memset(out, 0, numel);
    else if (keep)
        rounded(sums, levels, 0, over, out, numel, 0);
    else /* sums are computed again: cheaper than to write and read them; backwards, as the last are still in cache */
        for (size_t chunk = (numel + CHUNK - 1) / CHUNK; chunk-- > 0;) {
            size_t start = chunk * CHUNK;
            rounded(values + start, levels + start, factor, over, out + start, least(CHUNK, numel - start), sum);
        }
}

static inline void quantise(const f32 *values, const unsigned char *added, unsigned char *out, size_t numel,
                            size_t group, int sum)
{
    size_t groups = (numel + group - 1) / group, head = 4 * groups;
    for (size_t number = 0; number < groups; number++) {
        size_t start = number * group;
        float factor = sum ? ((const f32 *)added)[number] / POWER : 0;
        quantise_group(values + start, (const int8_t *)added + head + start, factor, (u32 *)out + number,
                       (int8_t *)out + head + start, least(group, numel - start), sum);
    }
}

/* out <- scales and levels of the values, or of their sums with those of a message (`added`, or NULL). */
void workbench_quantise(const f32 *values, const unsigned char *added, unsigned char *out, size_t numel, size_t group)
{
    if (added)
        quantise(values, added, out, numel, group, 1);
    else
        quantise(values, out, out, numel, group, 0); /* `out` is not read: it stands for no message */
}

static inline void restore(const unsigned char *wire, f32 *restrict out, size_t numel, size_t group, int add)
{
    size_t groups = (numel + group - 1) / group;
    const int8_t *restrict levels = (const int8_t *)wire + 4 * groups;
    for (size_t number = 0; number < groups; number++) {
        size_t stop = least(number * group + group, numel);
        float factor = ((const f32 *)wire)[number] / POWER;
        for (size_t i = number * group; i < stop; i++) {
            float x = decoded(levels[i], factor);
            out[i] = add ? out[i] + x : x;
        }
    }
}

/* out <- the values of scales and levels, or out + these. */
void workbench_restore(const unsigned char *wire, f32 *out, size_t numel, size_t group, int add)
{
    if (add)
        restore(wire, out, numel, group, 1);
    else
        restore(wire, out, numel, group, 0);
}

/* -- the largest values ------------------------------------------------------------------------------------------ */

/* Return the magnitude of rank `rank` (1: the largest). */
static uint32_t ranked(const u32 *magnitudes, size_t numel, size_t rank)
{
    static const int shifts[] = {20, 9, 0}, widths[] = {11, 11, 9};
    uint32_t prefix = 0; /* the high bits, as far as they are known */
    for (int round = 0; round < 3; round++) {
        int shift = shifts[round], above = shift + widths[round];
        uint32_t counts[BINS] = {0}, bin = (1u << widths[round]) - 1, last = bin;
        for (size_t i = 0; i < numel; i++)
            if (magnitudes[i] >> above == prefix >> above)
                counts[magnitudes[i] >> shift & last]++;
        while (counts[bin] < rank)
            rank -= counts[bin--];
        prefix |= bin << shift;
    }
    return prefix;
}

/* at <- positions of magnitudes of `threshold` or more. Return their number, or more than `room` if
   fewer than `LINE` places are left. */
static size_t candidates(const u32 *restrict bits, size_t numel, uint32_t threshold, u32 *restrict at, size_t room)
{
    size_t found = 0, start = 0;
#ifdef __AVX512F__ /* compilers do not find the instruction that packs the chosen lanes */
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; start + 16 <= numel; start += 16) {
        if (found + LINE > room)
            return room + 1;
        __m512i here = _mm512_and_si512(_mm512_loadu_si512(bits + start), _mm512_set1_epi32((int)MAGNITUDE));
        __mmask16 chosen = _mm512_cmpge_epu32_mask(here, _mm512_set1_epi32((int)threshold));
        __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)start));
        _mm512_storeu_si512(at + found, _mm512_maskz_compress_epi32(chosen, places));
        found += (size_t)__builtin_popcount(chosen);
    }
#endif
    for (; start < numel; start += LINE) {
        uint8_t hits[LINE] = {0};
        size_t size = least(LINE, numel - start);
        if (size == LINE) /* the compiler vectorises a loop of a fixed length */
            for (size_t i = 0; i < LINE; i++)
                hits[i] = magnitude_of(bits[start + i]) >= threshold;
        else
            for (size_t i = 0; i < size; i++)
                hits[i] = magnitude_of(bits[start + i]) >= threshold;
        if (found + LINE > room)
            return room + 1;
        for (size_t word = 0; word < LINE; word += 8) {
            uint64_t left;
            memcpy(&left, hits + word, 8);
            for (; left; left &= left - 1)
                at[found++] = (uint32_t)(start + word + (size_t)__builtin_ctzll(left) / 8); /* little-endian */
        }
    }
    return found;
}

/* out <- positions, ascending, then values, of the `num` largest magnitudes; of equal ones the first.

   One value in `stride` gives a threshold that slightly more than `num` values should reach: the one of rank `rank`
   among these. Return 0 if fewer reached it, or more than `room`. `at` and `magnitudes` have room for that number. */
int workbench_select(const u32 *values, size_t numel, size_t num, size_t stride, size_t rank, unsigned char *out,
                     u32 *at, u32 *magnitudes, size_t room)
{
    size_t sampled = least(numel / stride, room);
    for (size_t i = 0; i < sampled; i++)
        magnitudes[i] = magnitude_of(values[i * stride]);
    uint32_t threshold = rank < sampled ? ranked(magnitudes, sampled, rank) : 0;
    size_t found = candidates(values, numel, threshold, at, room);
    if (found < num || found > room)
        return 0;
    for (size_t i = 0; i < found; i++)
        magnitudes[i] = magnitude_of(values[at[i]]);
    threshold = ranked(magnitudes, found, num);
    size_t equal = num, kept = 0;
    for (size_t i = 0; i < found; i++)
        equal -= magnitudes[i] > threshold;
    for (size_t i = 0; kept < num; i++) { /* written before it is decided: no branch that cannot be predicted */
        size_t level = magnitudes[i] == threshold && equal;
        ((u32 *)out)[kept] = at[i];
        ((u32 *)out)[num + kept] = values[at[i]];
        kept += (magnitudes[i] > threshold) | level;
        equal -= level;
    }
    return 1;
}
