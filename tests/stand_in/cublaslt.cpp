// A stand-in for libcublasLt: products of column-major matrices in a stream of the stand-in device, as slow as they are plain. Three algorithms
// are offered, of which the first refuses to run. DCC_STAND_IN_PRODUCT scales results, to see that they are used.
#include <dlfcn.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {
enum Type { F32 = 0, F64 = 1, F16 = 2, BF16 = 14 };

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t leading;
    int32_t batch = 1;
    int64_t stride = 0;
};
struct Description {
    int compute, scale;
    int32_t transposed[2] = {0, 0};
};
struct Algorithm { uint64_t data[8]; };
struct Result {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

size_t width(int type) { return type == F64 ? 8 : type == F32 ? 4 : 2; }

double half(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 0) return (sign ? -1.0 : 1.0) * mantissa / 16777216.0;
    const uint32_t wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

double load(int type, const char* at) {
    if (type == F64) { double x; memcpy(&x, at, 8); return x; }
    if (type == F32) { float x; memcpy(&x, at, 4); return x; }
    uint16_t bits;
    memcpy(&bits, at, 2);
    if (type == F16) return half(bits);
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

void store(int type, char* at, double value) {
    if (type == F64) { memcpy(at, &value, 8); return; }
    const float x = (float)value;
    if (type == F32) { memcpy(at, &x, 4); return; }
    uint32_t wide;
    memcpy(&wide, &x, 4);
    uint16_t bits;
    if (type == BF16) {
        const bool nan = (wide & 0x7fffffffu) > 0x7f800000u;
        bits = (uint16_t)(nan ? wide >> 16 | 0x40 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    } else {
        const _Float16 narrow = (_Float16)x;
        memcpy(&bits, &narrow, 2);
    }
    memcpy(at, &bits, 2);
}

struct Work {
    Description description;
    Layout a, b, c, d;
    const char *at_a, *at_b, *at_c;
    char* at_d;
    double alpha, beta;

    void run() const {
        const bool ta = description.transposed[0], tb = description.transposed[1];
        const uint64_t rows = d.rows, columns = d.columns, sums = ta ? a.rows : a.columns;
        const char* scale = getenv("DCC_STAND_IN_PRODUCT");
        const double factor = scale ? atof(scale) : 1.0;
        const auto element = [](const Layout& layout, const char* at, int64_t batch, uint64_t row, uint64_t column) {
            return load(layout.type, at + width(layout.type) * (batch * layout.stride + row + column * layout.leading));
        };
        for (int64_t n = 0; n < d.batch; ++n)
            for (uint64_t j = 0; j < columns; ++j)
                for (uint64_t i = 0; i < rows; ++i) {
                    double sum = 0;
                    for (uint64_t k = 0; k < sums; ++k)
                        sum += (ta ? element(a, at_a, n, k, i) : element(a, at_a, n, i, k)) *
                               (tb ? element(b, at_b, n, j, k) : element(b, at_b, n, k, j));
                    double value = alpha * factor * sum;
                    if (beta != 0) value += beta * element(c, at_c, n, i, j);
                    store(d.type, at_d + width(d.type) * (n * d.stride + i + j * d.leading), value);
                }
    }
};

// Shapes that do not fit are what the library refuses too.
bool fits(const Description& description, const Layout& a, const Layout& b, const Layout& d) {
    const bool ta = description.transposed[0], tb = description.transposed[1];
    const uint64_t sums = ta ? a.rows : a.columns;
    const bool shapes = (ta ? a.columns : a.rows) == d.rows && (tb ? b.rows : b.columns) == d.columns && (tb ? b.columns : b.rows) == sums;
    const bool leading = a.leading >= (int64_t)a.rows && b.leading >= (int64_t)b.rows && d.leading >= (int64_t)d.rows;
    const bool types = a.type == b.type && (d.type == a.type || d.type == F32) && (a.type == F64) == (description.compute == 70);
    return shapes && leading && types && a.batch == d.batch && b.batch == d.batch;
}
}  // namespace

extern "C" {
// 0 is success, 7 an invalid value, 15 what is not supported.
int cublasLtCreate(void** handle) { *handle = malloc(1); return 0; }
int cublasLtDestroy(void* handle) { free(handle); return 0; }
size_t cublasLtGetVersion() { return 1; }
int cublasLtMatmulDescCreate(void** made, int compute, int scale) { *made = new Description{compute, scale}; return 0; }
int cublasLtMatmulDescDestroy(void* description) { delete (Description*)description; return 0; }
int cublasLtMatmulDescSetAttribute(void* description, int attribute, const void* value, size_t bytes) {
    if (attribute < 3 || attribute > 4 || bytes != 4) return 7;
    memcpy(&((Description*)description)->transposed[attribute - 3], value, 4);
    return 0;
}
int cublasLtMatrixLayoutCreate(void** made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    *made = new Layout{type, rows, columns, leading};
    return 0;
}
int cublasLtMatrixLayoutDestroy(void* layout) { delete (Layout*)layout; return 0; }
// 5 is the batch, 6 its stride.
int cublasLtMatrixLayoutSetAttribute(void* layout, int attribute, const void* value, size_t bytes) {
    Layout& own = *(Layout*)layout;
    if (attribute == 5 && bytes == 4) memcpy(&own.batch, value, 4);
    else if (attribute == 6 && bytes == 8) memcpy(&own.stride, value, 8);
    else return 7;
    return 0;
}
int cublasLtMatmulPreferenceCreate(void** made) { *made = malloc(1); return 0; }
int cublasLtMatmulPreferenceDestroy(void* preference) { free(preference); return 0; }
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void* description, void* a, void* b, void*, void* d, void*, int most, Result* results, int* count) {
    if (!fits(*(Description*)description, *(Layout*)a, *(Layout*)b, *(Layout*)d)) return 15;
    *count = most < 3 ? most : 3;
    for (int n = 0; n < *count; ++n) {
        results[n] = Result();
        results[n].algorithm.data[0] = (uint64_t)n + 1;
    }
    return 0;
}
int cublasLtMatmul(void*, void* description, const void* alpha, const void* at_a, void* a, const void* at_b, void* b, const void* beta,
                   const void* at_c, void* c, void* at_d, void* d, const Algorithm* algorithm, void*, size_t, void* stream) {
    static void* device = dlopen("libcuda.so", RTLD_NOW);
    static auto enqueue = (void (*)(void*, void (*)(void*), void*))dlsym(device, "emulated_enqueue");
    if (algorithm->data[0] < 2 || algorithm->data[0] > 3) return 15;
    if (!fits(*(Description*)description, *(Layout*)a, *(Layout*)b, *(Layout*)d)) return 7;
    const int scale = ((Description*)description)->scale;
    // Kept for graphs, which run it again.
    Work* work = new Work{*(Description*)description, *(Layout*)a, *(Layout*)b, *(Layout*)c, *(Layout*)d,
                          (const char*)at_a, (const char*)at_b, (const char*)at_c, (char*)at_d,
                          load(scale, (const char*)alpha), load(scale, (const char*)beta)};
    enqueue(stream, [](void* given) { ((Work*)given)->run(); }, work);
    return 0;
}
}
