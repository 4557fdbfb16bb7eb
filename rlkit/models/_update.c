/* The operations of an update between its matrix products, forward and backward: RMSNorm, rotary positions and the gate of the MLP.

   fused.py calls these functions. It compiles the file once for float32 and once, with -DHALF, for bfloat16. bfloat16 numbers are computed
   in float32 and rounded when they are stored. The rows are cut into blocks of fixed size, so sums do not depend on the number of threads. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 64
#define INLINE static inline __attribute__((always_inline))
#define BLOCKS(b, rows) _Pragma("omp parallel for num_threads(threads) if (threads > 1)") for (int64_t b = 0; b < (rows + BLOCK - 1) / BLOCK; b++)
#define END(b, rows) ((b + 1) * BLOCK < rows ? (b + 1) * BLOCK : rows)

#ifdef HALF
typedef uint16_t number;
INLINE float get(number x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}
INLINE number put(float x) { /* round to the nearest number, ties to even; a nan stays a nan */
    union { float value; uint32_t bits; } u = {x};
    return x != x ? 0x7fc0 : (u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16;
}
#else
typedef float number;
INLINE float get(number x) { return x; }
INLINE number put(float x) { return x; }
#endif

INLINE float squares(const number *a, int64_t n) {
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t j = 0; j < n; j++) s += get(a[j]) * get(a[j]);
    return s;
}

/* y = rotated(x / sqrt(mean(x^2) + eps) * weight) for rows [rows, n]. Each run of `heads` rows has the same position. If weight is NULL, the
   rows are not normalised; if cosine is NULL, they are not rotated. `scale` [rows] is kept for the backward pass. `room` [blocks, n] holds
   one row per block before it is rounded. Angles and scale are float32. */
void forward(const number *x, const number *weight, const float *cosine, const float *sine, number *y, float *scale, float *room,
             int64_t rows, int64_t heads, int64_t n, double eps, int64_t threads) {
    const int64_t half = n / 2;
    BLOCKS(b, rows) for (int64_t i = b * BLOCK; i < END(b, rows); i++) {
        const number *own = x + i * n;
        number *to = y + i * n;
        float *out = room + b * n;
        if (weight) {
            const float r = scale[i] = 1.0f / sqrtf(squares(own, n) / n + (float)eps);
#pragma omp simd
            for (int64_t j = 0; j < n; j++) out[j] = get(own[j]) * r * get(weight[j]);
        } else {
#pragma omp simd
            for (int64_t j = 0; j < n; j++) out[j] = get(own[j]);
        }
        if (cosine) {
            const float *c = cosine + i / heads * n, *s = sine + i / heads * n;
#pragma omp simd
            for (int64_t j = 0; j < half; j++) {
                const float u = out[j], v = out[j + half];
                to[j] = put(u * c[j] - v * s[j]);
                to[j + half] = put(v * c[j + half] + u * s[j + half]);
            }
        } else {
#pragma omp simd
            for (int64_t j = 0; j < n; j++) to[j] = put(out[j]);
        }
    }
}

/* Compute the gradient of x from the gradient of y. If `to_weight` is not NULL, also add up the gradient of the weight over each block
   [blocks, n]; `to_weight` must be zero before the call. */
void backward(const number *gradient, const number *x, const number *weight, const float *cosine, const float *sine, const float *scale,
              number *to_x, float *to_weight, float *room, int64_t rows, int64_t heads, int64_t n, int64_t threads) {
    const int64_t half = n / 2;
    BLOCKS(b, rows) for (int64_t i = b * BLOCK; i < END(b, rows); i++) {
        const number *g = gradient + i * n, *own = x + i * n;
        number *to = to_x + i * n;
        float *out = room + b * n, *sums = to_weight ? to_weight + b * n : 0;
        if (cosine) {
            const float *c = cosine + i / heads * n, *s = sine + i / heads * n;
#pragma omp simd
            for (int64_t j = 0; j < half; j++) {
                const float u = get(g[j]), v = get(g[j + half]);
                out[j] = u * c[j] + v * s[j + half];
                out[j + half] = v * c[j + half] - u * s[j];
            }
        } else {
#pragma omp simd
            for (int64_t j = 0; j < n; j++) out[j] = get(g[j]);
        }
        if (weight) {
            const float r = scale[i];
            float along = 0;
            if (sums) {
#pragma omp simd
                for (int64_t j = 0; j < n; j++) sums[j] += out[j] * get(own[j]) * r;
            }
#pragma omp simd reduction(+ : along)
            for (int64_t j = 0; j < n; j++) {
                out[j] *= get(weight[j]);
                along += out[j] * get(own[j]);
            }
            along *= r * r / n;
#pragma omp simd
            for (int64_t j = 0; j < n; j++) to[j] = put(r * (out[j] - get(own[j]) * along));
        } else {
#pragma omp simd
            for (int64_t j = 0; j < n; j++) to[j] = put(out[j]);
        }
    }
}

/* Compute exp(x) to about one unit in the last place, in a form that the compiler can vectorise: 2^k times a polynomial in r,
   |r| <= ln 2 / 2. */
INLINE float exponential(float x) {
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    const float k = rintf(x * 1.44269504f);
    const float r = x - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } power = {((int32_t)k + 127) << 23};
    return p * power.value;
}

#define EACH(j, size) _Pragma("omp parallel for simd num_threads(threads) if (parallel : threads > 1)") for (int64_t j = 0; j < size; j++)

/* y = silu(a) b. All of them are [size]. */
void gate(const number *a, const number *b, number *y, int64_t size, int64_t threads) {
    EACH(j, size) y[j] = put(get(a[j]) / (1.0f + exponential(-get(a[j]))) * get(b[j]));
}

void gate_backward(const number *gradient, const number *a, const number *b, number *to_a, number *to_b, int64_t size, int64_t threads) {
    EACH(j, size) {
        const float g = get(gradient[j]), x = get(a[j]), s = 1.0f / (1.0f + exponential(-x)), silu = x * s;
        to_b[j] = put(g * silu);
        to_a[j] = put(g * get(b[j]) * (s + silu * (1.0f - s)));
    }
}
