/* One decoding step of a Llama-like model. For every drawing row it runs the trunk and the head, draws a token and updates the row's state.

   Weights, keys and values are float32, or with -DHALF bfloat16. With -DHALF the inputs of products are also rounded to bfloat16; everything
   else is float32, including the residual stream and the logits. The results equal those of forward.py, functional/sampling.py and
   sampler.py up to the last bits of sums. With -DHALF they also differ because this code makes no intermediate roundings to bfloat16. A
   row's arithmetic depends neither on the other rows nor on the number of threads. The file is plain C with the vector types of GCC and
   clang. kernel.py compiles it, packs the weights and fills the structure `Step`. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12 /* rows whose sums are in registers together */
#define CHAINS 4 /* independent sums that are computed at the same time, because one addition takes about four cycles */
#elif defined(__AVX__)
#define LANES 8
#define ROWS 3
#define CHAINS 2
#else
#define LANES 4
#define ROWS 3
#define CHAINS 2
#endif
#define ALONE 8 /* each thread gets at least about this many rows: fewer are not worth another thread */
#define TILE 32 /* number of neighbouring columns stored together in a packed matrix */
#define PARTS (TILE / LANES)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#ifdef HALF
typedef uint16_t number;
typedef uint16_t svec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#else
typedef float number;
#endif

typedef struct { /* mirrored by kernel.StepArguments; all fields are 64 bits wide */
    int64_t layers, hidden, inner, heads, key_heads, size, vocabulary, capacity, page, pages, entries, columns, ends, slots, threads;
    double eps, temperature;
    const int64_t ranks[4];                       /* of the adapters of project, out, gates and down; 0 without adapters */
    const number *embedding;                      /* [V, H] */
    const float *cosine, *sine;                   /* [C, D / 2] */
    const number *head;                           /* packed */
    const float *norm;                            /* of the norm before the head [H]; NULL if it is part of `head` */
    const number *const *project, *const *out, *const *gates, *const *down; /* for each layer, packed */
    const float *const *bias, *const *scale;      /* for each layer: the bias of project; the weights of the norms of queries and keys */
    const float *const *before, *const *between;  /* for each layer: weights of the norms [H]; NULL if they are part of project and gates */
    const number *const *low, *const *high;       /* for each layer 4 pairs of adapter factors, packed; the scaling is part of `high` */
    number *const *keys, *const *values;          /* for each layer [Hk, pages, page, D] */
    const int64_t *table;                                                  /* [S, entries]: entry c of a slot is the page of its positions from c * page on */
    const int64_t *eos;
    int64_t *last, *position, *count, *limit, *seed, *tokens;
    float *logprobs;
    uint8_t *draws, *ended;
} Step;

typedef struct {
    const Step *step;
    const int64_t *rows;
    int64_t n;
} Share;

#define LOAD(p) (*(const vec *)(p))
#define STORE(p) (*(vec *)(p))

INLINE float sum(vec v) {
    float s[LANES];
    STORE(s) = v;
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}

/* e^x for x <= 0, with a relative error of 1e-7: 2^n e^r, |r| <= ln 2 / 2 (Cephes expf). */
INLINE vec exponential(vec x) {
    vec low = (vec){0} - 87.0f, magic = (vec){0} + 12582912.0f; /* adding, then subtracting 1.5 * 2^23 rounds to a whole number */
    ivec under = x < low;
    x = (vec)(((ivec)low & under) | ((ivec)x & ~under));
    vec n = (x * 1.44269504f + magic) - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vec)(((ivec)p + (__builtin_convertvector(n, ivec) << 23)) & ~under);
}

#ifdef HALF
INLINE vec load(const number *p) { return (vec)(__builtin_convertvector(*(const svec *)p, ivec) << 16); }
INLINE number rounded(float x) { /* round to the nearest number, ties to even; a nan stays a nan */
    union { float value; uint32_t bits; } u = {x};
    return x != x ? 0x7fc0 : (u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16;
}
/* Round the inputs of a product to bfloat16, in `room`. */
static const number *inputs(const float *x, int64_t size, number *room) {
    for (int64_t i = 0; i < size; i++) room[i] = rounded(x[i]);
    return room;
}
/* Compute acc + a[0] b[0] + a[1] b[1] in each lane; a lane holds two numbers. */
INLINE vec pairs(vec acc, ivec a, ivec b) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    return acc + (vec)(a << 16) * (vec)(b << 16) + (vec)(a & (int32_t)0xffff0000) * (vec)(b & (int32_t)0xffff0000);
#endif
}
#else
INLINE vec load(const number *p) { return LOAD(p); }
INLINE number rounded(float x) { return x; }
INLINE const number *inputs(const float *x, int64_t size, number *room) { return x; }
#endif

/* y[R, TILE] = start + x[R, in] w[in, TILE]; in bfloat16, w is stored as [in / 2, TILE, 2]. Every sum adds its terms in the order of `in`. */
INLINE void block(int R, const number *x, int64_t in, const number *w, const float *start, int64_t step, float *y, int64_t out) {
    vec acc[ROWS][PARTS];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < PARTS; c++) acc[r][c] = start ? LOAD(start + r * step + c * LANES) : (vec){0};
#ifdef HALF
    for (int64_t i = 0; i < in; i += 2, w += 2 * TILE)
        for (int r = 0; r < R; r++) {
            int32_t both;
            memcpy(&both, x + r * in + i, sizeof both);
            for (int c = 0; c < PARTS; c++) acc[r][c] = pairs(acc[r][c], (ivec){0} + both, *(const ivec *)(w + 2 * c * LANES));
        }
#else
    for (int64_t i = 0; i < in; i++, w += TILE)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < PARTS; c++) acc[r][c] += x[r * in + i] * LOAD(w + c * LANES);
#endif
    for (int r = 0; r < R; r++)
        for (int c = 0; c < PARTS; c++) STORE(y + r * out + c * LANES) = acc[r][c];
}

/* y[n, out] = x[n, in] w, plus a bias or, with add, plus y. w: [out / TILE, in, TILE]. */
static void product(int64_t n, const number *x, int64_t in, const number *w, const float *bias, int add, float *y, int64_t out) {
    int64_t blocks = (n + ROWS - 1) / ROWS;
    for (int64_t tile = 0; tile < out; tile += TILE, w += in * TILE)
        for (int64_t b = 0; b < blocks; b++) {
            int64_t from = n * b / blocks, step = add ? out : 0;
            const number *rows = x + from * in;
            float *to = y + from * out + tile;
            const float *start = add ? to : bias ? bias + tile : NULL;
#define CASE(R) case R: block(R, rows, in, w, start, step, to, out); break;
            switch (n * (b + 1) / blocks - from) {
                CASE(1) CASE(2) CASE(3)
#if ROWS > 3
                CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
        }
}

static int64_t padded(int64_t n) { return (n + TILE - 1) / TILE * TILE; }

/* Compute `product`. If ranks > 0, add the adapter's product: y += (x low) high. `room` gets x low, and `narrow` gets it in bfloat16. */
static void adapted(int64_t n, const number *x, int64_t in, const number *w, const float *bias, int add, float *y, int64_t out,
                    int64_t ranks, const number *low, const number *high, float *room, number *narrow) {
    product(n, x, in, w, bias, add, y, out);
    if (!ranks) return;
    product(n, x, in, low, NULL, 0, room, padded(ranks));
    product(n, inputs(room, n * padded(ranks), narrow), padded(ranks), high, NULL, 1, y, out);
}

/* y = x / sqrt(mean(x^2) + eps), times w unless w is NULL. */
INLINE void normalise(const float *x, int64_t n, float eps, const float *w, float *y) {
    vec squares = {0};
    for (int64_t i = 0; i < n; i += LANES) squares += LOAD(x + i) * LOAD(x + i);
    float by = 1.0f / sqrtf(sum(squares) / n + eps);
    for (int64_t i = 0; i < n; i += LANES) STORE(y + i) = w ? LOAD(x + i) * by * LOAD(w + i) : LOAD(x + i) * by;
}

/* Rotate x[D] by the angles of its position, in D / 2 planes. Entries i and i + D / 2 of x are the coordinates in plane i. */
INLINE void rotate(float *x, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        vec a = LOAD(x + i), b = LOAD(x + half + i), c = LOAD(cosine + i), s = LOAD(sine + i);
        STORE(x + i) = a * c - b * s;
        STORE(x + half + i) = b * c + a * s;
    }
}

/* Compute attention out[groups, D] of queries [groups, D] with shared keys and values. `table` names the pages of the first `length`
   positions. p has room for 5 numbers per position; at the end its first `length` numbers are the unnormalised attention weights. */
INLINE void attend(int64_t D, int64_t groups, const float *q, const number *keys, const number *values, const int64_t *table, int64_t page,
                   int64_t length, float *p, float *out) {
    int64_t filled = (length + LANES - 1) / LANES * LANES;
    float scaling = 1.0f / sqrtf(D), *quarters = p + filled;
    for (int64_t g = 0; g < groups; g++, q += D, out += D) {
        for (int64_t from = 0; from < length; from += page) {
            const number *k = keys + table[from / page] * page * D;
            int64_t here = length - from < page ? length - from : page;
            for (int64_t t = 0; t < here; t++) { /* leave each sum in four parts; a later loop adds the parts, for many positions at once */
                union {
                    vec all;
                    quad four[LANES / 4];
                } s = {{0}};
                for (int64_t i = 0; i < D; i += TILE)
                    for (int c = 0; c < TILE; c += LANES) s.all += LOAD(q + i + c) * load(k + t * D + i + c);
                for (int c = 1; c < LANES / 4; c++) s.four[0] += s.four[c];
                *(quad *)(quarters + 4 * (from + t)) = s.four[0];
            }
        }
        float highest = -INFINITY;
        for (int64_t t = 0; t < length; t++)
            p[t] = scaling * ((quarters[4 * t] + quarters[4 * t + 1]) + (quarters[4 * t + 2] + quarters[4 * t + 3]));
        for (int64_t t = 0; t < length; t++) highest = p[t] > highest ? p[t] : highest;
        for (int64_t t = length; t < filled; t++) p[t] = -INFINITY;
        vec mass = {0};
        for (int64_t t = 0; t < filled; t += LANES) mass += STORE(p + t) = exponential(LOAD(p + t) - highest);
        float by = 1.0f / sum(mass);
        for (int64_t i = 0; i < D; i += TILE) {
            vec s[CHAINS][PARTS] = {{{0}}};
            for (int64_t from = 0; from < length; from += page) {
                const number *v = values + table[from / page] * page * D + i;
                const float *weight = p + from;
                int64_t here = length - from < page ? length - from : page, t = 0;
                for (; t + CHAINS <= here; t += CHAINS)
                    for (int n = 0; n < CHAINS; n++)
                        for (int c = 0; c < PARTS; c++) s[n][c] += weight[t + n] * load(v + (t + n) * D + c * LANES);
                for (; t < here; t++)
                    for (int c = 0; c < PARTS; c++) s[0][c] += weight[t] * load(v + t * D + c * LANES);
            }
            for (int c = 0; c < PARTS; c++) {
                for (int n = 1; n < CHAINS; n++) s[0][c] += s[n][c];
                STORE(out + i + c * LANES) = s[0][c] * by;
            }
        }
    }
}

INLINE uint64_t mixed(uint64_t w) {
    w = (w ^ (w >> 30)) * 0xBF58476D1CE4E5B9u;
    return (w ^ (w >> 27)) * 0x94D049BB133111EBu;
}

INLINE uint64_t finalised(uint64_t w) {
    w = mixed(w);
    return w ^ (w >> 31);
}

/* Compute functional.gumbel_noise for one token. */
INLINE float gumbel(uint64_t state, uint64_t token) {
    uint64_t bits = mixed(state + (token + 1) * 0x9E3779B97F4A7C15u) >> 33;
    float u = ((float)bits + 0.5f) * 0x1p-31f;
    return -logf(-log1pf(-(u < 1 - 0x1p-24f ? u : 1 - 0x1p-24f)));
}

/* Compute functional.gumbel_choice for one row with logits x[V]: return the token, and write its log-prob. p gets
   exp((x - highest) / temperature). */
static int64_t draw(const float *x, float *p, int64_t V, float temperature, int64_t seed, int64_t count, float *logprob) {
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    uint64_t state = finalised((finalised((uint64_t)seed + golden) ^ (uint64_t)count) + golden);
    float divisor = temperature == 0 ? 1 : temperature, highest = -INFINITY, best = -INFINITY;
    int64_t size = 1, opened = 0, token = 0;
    while (size * size < V) size++;
    for (int64_t v = 0; v < V; v++)
        if (x[v] > highest) highest = x[v], token = v;
    for (int64_t v = 0; v < V; v += LANES) STORE(p + v) = exponential((LOAD(x + v) - highest) / divisor); /* x and p are padded */
    double all = 0;
    for (int64_t b = 0; b <= V / size; b++) {
        float mass = 0;
        for (int64_t v = b * size; v < V && v < (b + 1) * size; v++) mass += p[v];
        all += mass;
        float score = mass > 0 && temperature != 0 ? logf(mass) + gumbel(state, b) : -INFINITY;
        if (score > best) best = score, opened = b;
    }
    best = -INFINITY;
    for (int64_t i = 0, v = opened * size; i < size && v < V && temperature != 0; i++, v++) {
        float score = p[v] > 0 ? (x[v] - highest) / divisor + gumbel(state, V / size + 1 + i) : -INFINITY;
        if (score > best) best = score, token = v;
    }
    *logprob = (x[token] - highest) / divisor - (float)log(all);
    return token;
}

static void keep(const Step *m, int64_t row, int64_t token, float logprob) {
    int64_t at = row * m->columns + m->count[row]++;
    m->tokens[at] = token, m->logprobs[at] = logprob, m->last[row] = token;
    m->position[row]++;
    int over = m->count[row] >= m->limit[row];
    for (int64_t i = 0; i < m->ends; i++) over |= token == m->eos[i];
    m->draws[row] = !over, m->ended[row] |= over;
}

/* Decode one token in each row of one thread's share. */
static void *decode(void *given) {
    const Share *share = given;
    const Step *m = share->step;
    int64_t n = share->n, H = m->hidden, D = m->size, both = m->heads + m->key_heads, groups = m->heads / m->key_heads;
    int64_t qkv = padded((both + m->key_heads) * D), wide = padded(2 * m->inner), V = padded(m->vocabulary), ranks = 0, widest = 0;
    int64_t most = wide > V ? wide : V;
    for (int i = 0; i < 4; i++) ranks = padded(m->ranks[i]) > ranks ? padded(m->ranks[i]) : ranks;
    const int64_t sizes[] = {H, m->heads * D, m->inner, ranks};
    for (int i = 0; i < 4; i++) widest = sizes[i] > widest ? sizes[i] : widest;
    int64_t floats = n * (2 * padded(H) + qkv + m->heads * D + most + m->inner + ranks) + 5 * m->capacity + 5 * LANES + V;
    float *x = malloc(sizeof(float) * floats + sizeof(number) * n * (widest + ranks));
    if (!x) return (void *)1;
    float *y = x + n * padded(H), *p = y + n * padded(H), *o = p + n * qkv, *w = o + n * m->heads * D;
    float *act = w + n * most, *room = act + n * m->inner, *probabilities = room + n * ranks;
    number *in = (number *)(x + floats), *narrow = in + n * widest;
    for (int64_t r = 0; r < n; r++)
        for (int64_t i = 0; i < H; i += LANES) STORE(x + r * H + i) = load(m->embedding + m->last[share->rows[r]] * H + i);
#define ADAPTED(i, from, size, matrix, bias, add, to, columns)                                                                    \
    adapted(n, inputs(from, n * (size), in), size, matrix, bias, add, to, columns, m->ranks[i], m->low[4 * layer + i], m->high[4 * layer + i], \
            room, narrow)
    for (int64_t layer = 0; layer < m->layers; layer++) {
        for (int64_t r = 0; r < n; r++) normalise(x + r * H, H, m->eps, m->before[layer], y + r * H);
        ADAPTED(0, y, H, m->project[layer], m->bias[layer], 0, p, qkv);
        for (int64_t r = 0; r < n; r++) {
            int64_t row = share->rows[r], at = m->position[row];
            float *own = p + r * qkv;
            for (int64_t h = 0; h < both; h++) {
                if (m->scale[layer]) normalise(own + h * D, D, m->eps, m->scale[layer] + h * D, own + h * D);
                rotate(own + h * D, m->cosine + at * D / 2, m->sine + at * D / 2, D / 2);
            }
            const int64_t *table = m->table + row * m->entries;
            int64_t place = (table[at / m->page] * m->page + at % m->page) * D;
            for (int64_t h = 0; h < m->key_heads; h++) {
                int64_t head = h * m->pages * m->page * D;
                number *k = m->keys[layer] + head, *v = m->values[layer] + head;
                for (int64_t i = 0; i < D; i++) k[place + i] = rounded(own[(m->heads + h) * D + i]);
                for (int64_t i = 0; i < D; i++) v[place + i] = rounded(own[(both + h) * D + i]);
                float *to = o + (r * m->heads + h * groups) * D, *q = own + h * groups * D;
                attend(D, groups, q, k, v, table, m->page, at + 1, probabilities, to);
            }
        }
        ADAPTED(1, o, m->heads * D, m->out[layer], NULL, 1, x, H);
        for (int64_t r = 0; r < n; r++) normalise(x + r * H, H, m->eps, m->between[layer], y + r * H);
        ADAPTED(2, y, H, m->gates[layer], NULL, 0, w, wide);
        for (int64_t r = 0; r < n; r++)
            for (int64_t i = 0; i < m->inner; i += LANES) {
                vec gate = LOAD(w + r * wide + i), size = (vec)((ivec)gate & 0x7fffffff), e = exponential(-size);
                ivec negative = gate < 0; /* sigmoid: 1 / (1 + e^-g), or e^g / (1 + e^g) */
                vec above = (vec)(((ivec)e & negative) | ((ivec)(e - e + 1.0f) & ~negative));
                STORE(act + r * m->inner + i) = gate * above / (1.0f + e) * LOAD(w + r * wide + m->inner + i);
            }
        ADAPTED(3, act, m->inner, m->down[layer], NULL, 1, x, H);
    }
    for (int64_t r = 0; r < n; r++) normalise(x + r * H, H, m->eps, m->norm, y + r * H);
    product(n, inputs(y, n * H, in), H, m->head, NULL, 0, w, V);
    for (int64_t r = 0; r < n; r++) {
        int64_t row = share->rows[r];
        float logprob;
        int64_t token = draw(w + r * V, probabilities, m->vocabulary, m->temperature, m->seed[row], m->count[row], &logprob);
        keep(m, row, token, logprob);
    }
    free(x);
    return NULL;
}

/* Decode one token in every drawing row. The rows are cut into equal shares, one for each thread. Returns 0, or 1 if memory ran out. */
int step(const Step *m) {
    int64_t rows[m->slots + 1], n = 0;
    for (int64_t row = 0; row < m->slots; row++)
        if (m->draws[row]) rows[n++] = row;
    int64_t most = (n + ALONE - 1) / ALONE, threads = m->threads < most ? m->threads : most;
    pthread_t others[threads + 1];
    Share shares[threads + 1];
    void *failed = NULL, *left;
    for (int64_t t = threads - 1; t >= 0; t--) {
        int64_t from = n * t / threads;
        shares[t] = (Share){m, rows + from, n * (t + 1) / threads - from};
        if (t == 0 || pthread_create(&others[t], NULL, decode, &shares[t])) {
            failed = decode(&shares[t]) ? (void *)1 : failed;
            others[t] = 0;
        }
    }
    for (int64_t t = 1; t < threads; t++)
        if (others[t] && !pthread_join(others[t], &left)) failed = left ? left : failed;
    return failed != NULL;
}
