/* What an update computes between its matrix products, forward and backward, in float32: RMSNorm, rotary positions, the gate.

   fused.py compiles and calls it. Rows go in blocks, whose sums do not depend on the number of threads. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 64
#define INLINE static inline __attribute__((always_inline))
#define BLOCKS(b, rows) _Pragma("omp parallel for num_threads(threads) if (threads > 1)") for (int64_t b = 0; b < (rows + BLOCK - 1) / BLOCK; b++)
#define END(b, rows) ((b + 1) * BLOCK < rows ? (b + 1) * BLOCK : rows)

INLINE float dot(const float *a, const float *b, int64_t n) {
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t j = 0; j < n; j++) s += a[j] * b[j];
    return s;
}

/* y = rotated(x / sqrt(mean(x^2) + eps) * weight) for rows [rows, n], `heads` of which have the same position. Without a weight nothing is
   normalised, without a cosine nothing rotated. `scale` [rows] is kept for the backward pass. */
void forward(const float *x, const float *weight, const float *cosine, const float *sine, float *y, float *scale, int64_t rows,
             int64_t heads, int64_t n, double eps, int64_t threads) {
    const int64_t half = n / 2;
    BLOCKS(b, rows) for (int64_t i = b * BLOCK; i < END(b, rows); i++) {
        const float *own = x + i * n;
        float *out = y + i * n;
        if (weight) {
            const float r = scale[i] = 1.0f / sqrtf(dot(own, own, n) / n + (float)eps);
#pragma omp simd
            for (int64_t j = 0; j < n; j++) out[j] = own[j] * r * weight[j];
        } else {
            memcpy(out, own, n * sizeof(float));
        }
        if (cosine) {
            const float *c = cosine + i / heads * n, *s = sine + i / heads * n;
#pragma omp simd
            for (int64_t j = 0; j < half; j++) {
                const float u = out[j], v = out[j + half];
                out[j] = u * c[j] - v * s[j];
                out[j + half] = v * c[j + half] + u * s[j + half];
            }
        }
    }
}

/* From the gradient of y that of x, and that of the weight summed over each block [blocks, n], which is zero before. */
void backward(const float *gradient, const float *x, const float *weight, const float *cosine, const float *sine, const float *scale,
              float *to_x, float *to_weight, int64_t rows, int64_t heads, int64_t n, int64_t threads) {
    const int64_t half = n / 2;
    BLOCKS(b, rows) for (int64_t i = b * BLOCK; i < END(b, rows); i++) {
        const float *g = gradient + i * n, *own = x + i * n;
        float *out = to_x + i * n, *sums = to_weight + b * n;
        if (cosine) {
            const float *c = cosine + i / heads * n, *s = sine + i / heads * n;
#pragma omp simd
            for (int64_t j = 0; j < half; j++) {
                out[j] = g[j] * c[j] + g[j + half] * s[j + half];
                out[j + half] = g[j + half] * c[j + half] - g[j] * s[j];
            }
        } else {
            memcpy(out, g, n * sizeof(float));
        }
        if (weight) {
            const float r = scale[i];
            float along = 0;
#pragma omp simd reduction(+ : along)
            for (int64_t j = 0; j < n; j++) {
                sums[j] += out[j] * own[j] * r;
                out[j] *= weight[j];
                along += out[j] * own[j];
            }
            along *= r * r / n;
#pragma omp simd
            for (int64_t j = 0; j < n; j++) out[j] = r * (out[j] - own[j] * along);
        }
    }
}

/* exp(x) to about one unit in the last place, as a loop of vectors takes it: 2^k times a polynomial within ln 2 / 2 of 0. */
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

/* y = silu(a) b, all [size]. */
void gate(const float *a, const float *b, float *y, int64_t size, int64_t threads) {
    EACH(j, size) y[j] = a[j] / (1.0f + exponential(-a[j])) * b[j];
}

void gate_backward(const float *gradient, const float *a, const float *b, float *to_a, float *to_b, int64_t size, int64_t threads) {
    EACH(j, size) {
        const float s = 1.0f / (1.0f + exponential(-a[j])), silu = a[j] * s;
        to_b[j] = gradient[j] * silu;
        to_a[j] = gradient[j] * b[j] * (s + silu * (1.0f - s));
    }
}
