// A stand-in for libcudnn: graphs of operations on tensors of four dims, interpreted in f64 in a stream of the stand-in device. Descriptors are
// checked as the library's header says; what is not interpreted is refused. Four engines are offered: the first refuses to be planned, the second
// varies and computes nonsense, the third needs a workspace, the fourth none. DCC_STAND_IN_ATTENTION scales results of half floats, to see that
// they are used.
#include <dlfcn.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace {
enum Status { SUCCESS = 0, BAD_PARAM = 2000, MISALIGNED = 2003, NOT_SUPPORTED = 3000 };
enum Data { F32 = 0, F16 = 2, BF16 = 9 };
enum Mode { ADD = 0, MUL = 1, SUB = 9, EXP = 13, IDENTITY = 21, CMP_GE = 303 };
enum Kind {
    Pointwise = 0, Engine = 2, Config = 3, Heuristics = 4, Plan = 5, PointwiseOp = 13, Graph = 15, Pack = 16, Tensor = 17, Matmul = 18, MatmulOp = 19,
    Reduction = 21, ReductionOp = 22, ReshapeOp = 31, Device = 38, AttentionOp = 41, BandOp = 44, AnyOp = -1,
};
enum Type {
    HANDLE = 0, DATA = 1, BOOLEAN = 2, INT64 = 3, POINTER = 6, HEURISTICS = 8, NOTE = 11, MODE = 14, DESCRIPTOR = 15, OPERATOR = 18, CHAR = 24,
    READ = -1, WRITTEN = -2,  // Descriptors of tensors that an operation reads, and that it writes.
};
enum Name {
    POINTWISE_MODE = 0, POINTWISE_PRECISION = 1, HEURISTICS_MODE = 200, HEURISTICS_GRAPH = 201, HEURISTICS_RESULTS = 202, HEURISTICS_DEVICE = 204,
    CONFIG_ENGINE = 300, PLAN_HANDLE = 400, PLAN_CONFIG = 401, PLAN_WORKSPACE = 402, PLAN_DEVICE = 407, POINTWISE_BY = 750, POINTWISE_X = 751,
    POINTWISE_B = 752, POINTWISE_Y = 753, GRAPH_HANDLE = 800, GRAPH_OPS = 801, TENSOR_ALIGNMENT = 900, TENSOR_DATA = 901, TENSOR_DIMS = 902,
    TENSOR_STRIDES = 903, TENSOR_UID = 906, TENSOR_IS_VIRTUAL = 907, TENSOR_IS_BY_VALUE = 908, PACK_UIDS = 1000, PACK_POINTERS = 1001,
    PACK_WORKSPACE = 1003, ENGINE_GRAPH = 1300, ENGINE_NUMBER = 1301, ENGINE_NOTES = 1303, MATMUL_PRECISION = 1500, MATMUL_A = 1520, MATMUL_B = 1521,
    MATMUL_C = 1522, MATMUL_BY = 1523, REDUCTION_OPERATOR = 1600, REDUCTION_PRECISION = 1601, REDUCTION_X = 1610, REDUCTION_Y = 1611,
    REDUCTION_BY = 1612, RESHAPE_X = 2200, RESHAPE_Y = 2201, DEVICE_JSON = 2702, ATTENTION_Q = 2800, ATTENTION_K = 2801, ATTENTION_V = 2802,
    ATTENTION_O = 2803, ATTENTION_STATS = 2804, ATTENTION_SCALE = 2805, ATTENTION_SUBGRAPH = 2811, ATTENTION_INPUT = 2812, ATTENTION_OUTPUT = 2813,
    BAND_X = 3000, BAND_B = 3005, BAND_Y = 3006, BAND_MODE = 3007,
};
constexpr int MODE_A = 3, TENSOR_CORE = 0, NONDETERMINISTIC = 4, ENGINES = 4, SCRATCH_BYTES = 1024, ALIGNMENT = 16;

// An attribute of a kind: who sets it, how many values there may be, and of what kind others are.
enum Use { Needed, Optional, ReadOnly };
struct Attribute { Kind kind; Name name; Type type; Use use = Needed; int64_t most = 1; Kind of = Tensor; };
constexpr int64_t MANY = INT64_MAX;
constexpr Attribute ATTRIBUTES[] = {
    {Tensor, TENSOR_ALIGNMENT, INT64}, {Tensor, TENSOR_DATA, DATA}, {Tensor, TENSOR_DIMS, INT64, Needed, 4},
    {Tensor, TENSOR_STRIDES, INT64, Needed, 4}, {Tensor, TENSOR_UID, INT64}, {Tensor, TENSOR_IS_VIRTUAL, BOOLEAN, Optional},
    {Tensor, TENSOR_IS_BY_VALUE, BOOLEAN, Optional}, {Pointwise, POINTWISE_MODE, MODE}, {Pointwise, POINTWISE_PRECISION, DATA},
    {PointwiseOp, POINTWISE_BY, DESCRIPTOR, Needed, 1, Pointwise}, {PointwiseOp, POINTWISE_X, READ}, {PointwiseOp, POINTWISE_B, READ, Optional},
    {PointwiseOp, POINTWISE_Y, WRITTEN}, {Matmul, MATMUL_PRECISION, DATA}, {MatmulOp, MATMUL_BY, DESCRIPTOR, Needed, 1, Matmul},
    {MatmulOp, MATMUL_A, READ}, {MatmulOp, MATMUL_B, READ}, {MatmulOp, MATMUL_C, WRITTEN}, {Reduction, REDUCTION_OPERATOR, OPERATOR},
    {Reduction, REDUCTION_PRECISION, DATA}, {ReductionOp, REDUCTION_BY, DESCRIPTOR, Needed, 1, Reduction}, {ReductionOp, REDUCTION_X, READ},
    {ReductionOp, REDUCTION_Y, WRITTEN}, {ReshapeOp, RESHAPE_X, READ}, {ReshapeOp, RESHAPE_Y, WRITTEN}, {BandOp, BAND_X, READ},
    {BandOp, BAND_B, READ}, {BandOp, BAND_Y, WRITTEN}, {BandOp, BAND_MODE, MODE}, {AttentionOp, ATTENTION_Q, READ},
    {AttentionOp, ATTENTION_K, READ}, {AttentionOp, ATTENTION_V, READ}, {AttentionOp, ATTENTION_O, WRITTEN},
    {AttentionOp, ATTENTION_STATS, WRITTEN, Optional}, {AttentionOp, ATTENTION_SCALE, READ, Optional},
    {AttentionOp, ATTENTION_SUBGRAPH, DESCRIPTOR, Optional, 1, Graph}, {AttentionOp, ATTENTION_INPUT, INT64, Optional},
    {AttentionOp, ATTENTION_OUTPUT, INT64, Optional}, {Graph, GRAPH_HANDLE, HANDLE, Optional}, {Graph, GRAPH_OPS, DESCRIPTOR, Needed, MANY, AnyOp},
    {Device, DEVICE_JSON, CHAR, Needed, MANY}, {Heuristics, HEURISTICS_MODE, HEURISTICS},
    {Heuristics, HEURISTICS_GRAPH, DESCRIPTOR, Needed, 1, Graph}, {Heuristics, HEURISTICS_DEVICE, DESCRIPTOR, Optional, 1, Device},
    {Heuristics, HEURISTICS_RESULTS, DESCRIPTOR, ReadOnly, MANY, Config}, {Config, CONFIG_ENGINE, DESCRIPTOR, ReadOnly, 1, Engine},
    {Engine, ENGINE_GRAPH, DESCRIPTOR, ReadOnly, 1, Graph}, {Engine, ENGINE_NUMBER, INT64, ReadOnly}, {Engine, ENGINE_NOTES, NOTE, ReadOnly, MANY},
    {Plan, PLAN_HANDLE, HANDLE, Optional}, {Plan, PLAN_DEVICE, DESCRIPTOR, Optional, 1, Device}, {Plan, PLAN_CONFIG, DESCRIPTOR, Needed, 1, Config},
    {Plan, PLAN_WORKSPACE, INT64, ReadOnly}, {Pack, PACK_UIDS, INT64, Needed, MANY}, {Pack, PACK_POINTERS, POINTER, Needed, MANY},
    {Pack, PACK_WORKSPACE, POINTER},
};
size_t width(Type type) { return type == HANDLE || type == INT64 || type == POINTER ? 8 : type == BOOLEAN || type == CHAR ? 1 : 4; }

struct Refusal { Status status; const char* what; };
void require(bool holds, const char* what, Status status = BAD_PARAM) { if (!holds) throw Refusal{status, what}; }

struct Descriptor {
    Kind kind;
    bool finalized = false;
    std::map<int, std::vector<char>> values = {};
    std::map<int, std::vector<std::shared_ptr<Descriptor>>> others = {};
    bool has(Name name) const { return values.count(name) || others.count(name); }
    template <typename T> std::vector<T> all(Name name) const {
        if (!values.count(name)) return {};
        const std::vector<char>& bytes = values.at(name);
        return {(const T*)bytes.data(), (const T*)(bytes.data() + bytes.size())};
    }
    template <typename T> T one(Name name) const { return values.count(name) ? all<T>(name).front() : T(); }
    template <typename T> void say(Name name, const std::vector<T>& v) { values[name].assign((char*)v.data(), (char*)(v.data() + v.size())); }
    const Descriptor& other(Name name) const { return *others.at(name).front(); }
};
using Shared = std::shared_ptr<Descriptor>;
using Index = std::array<int64_t, 4>;
template <typename Each> void for_all(const Index& dims, Each each) {
    for (int64_t n = 0, all = dims[0] * dims[1] * dims[2] * dims[3]; n < all; ++n)
        each(Index{n / (dims[1] * dims[2] * dims[3]), n / (dims[2] * dims[3]) % dims[1], n / dims[3] % dims[2], n % dims[3]});
}

// Where a tensor's elements are.
struct View {
    int64_t uid;
    int data;
    Index dims, strides;
    bool passes = true, is_value = false;
    View(int64_t uid, int data, const Index& d) : uid(uid), data(data), dims(d), strides{d[1] * d[2] * d[3], d[2] * d[3], d[3], 1} {}
    View(const Descriptor& of) : uid(of.one<int64_t>(TENSOR_UID)), data(of.one<int>(TENSOR_DATA)) {
        passes = of.one<char>(TENSOR_IS_VIRTUAL), is_value = of.one<char>(TENSOR_IS_BY_VALUE);
        const std::vector<int64_t> sizes = of.all<int64_t>(TENSOR_DIMS), steps = of.all<int64_t>(TENSOR_STRIDES);
        require(sizes.size() == 4 && steps.size() == 4, "a tensor of other than four dims");
        for (int d = 0; d < 4; ++d) dims[d] = sizes[d], strides[d] = steps[d];
    }
    size_t bytes() const { return data == F32 ? 4 : 2; }
    int64_t count() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
    int64_t offset(const Index& i) const { return i[0] * strides[0] + i[1] * strides[1] + i[2] * strides[2] + i[3] * strides[3]; }
    int64_t reach() const { return offset({dims[0] - 1, dims[1] - 1, dims[2] - 1, dims[3] - 1}) + 1; }
    bool is_number() const { return count() == 1 && data == F32; }
    // Where fewer elements of a dim stand for as many neighbours each.
    int64_t at(int64_t i, int d, const View& of) const { return i / (of.dims[d] / dims[d]); }
    Index at(const Index& i, const View& of) const { return {at(i[0], 0, of), at(i[1], 1, of), at(i[2], 2, of), at(i[3], 3, of)}; }
};

// Where the tensors of a graph are while it runs. Virtual ones are its own: NaN where nothing was written.
struct Memory {
    std::map<int64_t, char*> places = {};
    std::map<int64_t, std::vector<char>> own = {};
    double factor = 1;

    void keep(int64_t uid, const std::vector<char>& bytes) { places[uid] = (own[uid] = bytes).data(); }
    double read(const View& t, int64_t offset) const {
        const char* at = places.at(t.uid) + t.bytes() * offset;
        _Float16 half;
        if (t.data == F16) return memcpy(&half, at, 2), (double)half;
        const char wide[4] = {0, 0, at[0], at[1]};
        float x;
        return memcpy(&x, t.data == F32 ? at : wide, 4), x;
    }
    double read(const View& t, const Index& i) const { return read(t, t.offset(i)); }
    void write(const View& t, const Index& i, double value) {
        if (!places[t.uid]) keep(t.uid, std::vector<char>(t.reach() * t.bytes(), '\xff'));
        const float x = (float)(t.passes || t.data == F32 ? value : factor * value);
        const _Float16 half = (_Float16)x;
        uint32_t wide;
        memcpy(&wide, &x, 4);
        const uint16_t brain = (uint16_t)(std::isnan(x) ? wide >> 16 | 0x40 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16);
        const void* stored = t.data == F32 ? (const void*)&x : t.data == F16 ? (const void*)&half : &brain;
        memcpy(places.at(t.uid) + t.bytes() * t.offset(i), stored, t.bytes());
    }
};

// What an operation reads, or writes.
std::vector<View> tensors(const Descriptor& op, Type type) {
    std::vector<View> found;
    for (const Attribute& a : ATTRIBUTES)
        if (a.kind == op.kind && a.type == type && op.has(a.name)) found.emplace_back(op.other(a.name));
    return found;
}
// All of a graph's tensors and of those within, by number.
std::map<int64_t, const Descriptor*> collected(const Descriptor& graph, std::map<int64_t, const Descriptor*> found = {}) {
    for (const Shared& op : graph.others.at(GRAPH_OPS))
        for (const auto& named : op->others) {
            const Shared& other = named.second.front();
            if (other->kind == Graph) found = collected(*other, found);
            const int64_t uid = other->one<int64_t>(TENSOR_UID);
            require(other->kind != Tensor || found.emplace(uid, other.get()).first->second == other.get(), "two tensors of one number");
        }
    return found;
}
// `known`: virtual tensors that are there before. An attention is a graph by itself.
void check_order(const Descriptor& graph, std::set<int64_t> known) {
    for (const Shared& op : graph.others.at(GRAPH_OPS)) {
        require(op->kind != AttentionOp || known.empty(), "an attention among other operations", NOT_SUPPORTED);
        for (const View& t : tensors(*op, READ)) require(!known.insert(t.uid).second || !t.passes, "a virtual tensor that nothing wrote");
        for (const View& t : tensors(*op, WRITTEN)) require(!t.is_value && known.insert(t.uid).second, "a tensor that was read or written before");
    }
}

void run_one(const Descriptor& op, Memory& memory) {
    const View x = tensors(op, READ).front(), b = tensors(op, READ).back(), y = tensors(op, WRITTEN).front();
    std::map<Index, double> sums;
    if (op.kind == ReductionOp) for_all(x.dims, [&](const Index& i) { sums[y.at(i, x)] += memory.read(x, i); });
    const int mode = op.kind == PointwiseOp ? op.other(POINTWISE_BY).one<int>(POINTWISE_MODE) : 0;
    for_all(y.dims, [&](const Index& i) {
        double value = 0;
        if (op.kind == PointwiseOp) {
            const double p = memory.read(x, x.at(i, y)), q = memory.read(b, b.at(i, y));
            value = mode == ADD ? p + q : mode == MUL ? p * q : mode == SUB ? p - q : mode == EXP ? exp(p) : p;
        }
        for (int64_t k = 0; op.kind == MatmulOp && k < x.dims[3]; ++k)
            value += memory.read(x, {x.at(i[0], 0, y), x.at(i[1], 1, y), i[2], k}) * memory.read(b, {b.at(i[0], 0, y), b.at(i[1], 1, y), k, i[3]});
        if (op.kind == ReductionOp) value = sums[i];
        if (op.kind == BandOp) value = i[2] >= i[3] ? memory.read(x, i) : memory.read(b, Index());
        if (op.kind == ReshapeOp) value = memory.read(x, y.offset(i));  // The same memory, seen in other dims and strides.
        memory.write(y, i, value);
    });
}

// The scores before and behind what is done to them within an attention.
std::array<View, 2> scores(const Descriptor& op) {
    const View q(op.other(ATTENTION_Q)), k(op.other(ATTENTION_K)), own(INT64_MIN, F32, {q.dims[0], q.dims[1], q.dims[2], k.dims[2]});
    if (!op.has(ATTENTION_SUBGRAPH)) return {own, own};
    std::map<int64_t, const Descriptor*> within = collected(op.other(ATTENTION_SUBGRAPH));
    const Descriptor *from = within[op.one<int64_t>(ATTENTION_INPUT)], *to = within[op.one<int64_t>(ATTENTION_OUTPUT)];
    require(from && to && View(*from).passes && View(*to).passes, "a subgraph without what it begins or ends with");
    require(View(*from).dims == own.dims && View(*to).dims == own.dims, "a subgraph of other than scores");
    return {*from, *to};
}

void attention(const Descriptor& op, Memory& memory) {
    const View q(op.other(ATTENTION_Q)), k(op.other(ATTENTION_K)), v(op.other(ATTENTION_V)), o(op.other(ATTENTION_O));
    const std::array<View, 2> ends = scores(op);
    const double scale = op.has(ATTENTION_SCALE) ? memory.read(op.other(ATTENTION_SCALE), Index()) : 1;
    for_all(ends[0].dims, [&](const Index& i) {
        double dot = 0;
        for (int64_t c = 0; c < q.dims[3]; ++c) dot += memory.read(q, {i[0], i[1], i[2], c}) * memory.read(k, {i[0], k.at(i[1], 1, q), i[3], c});
        memory.write(ends[0], i, scale * dot);
    });
    if (op.has(ATTENTION_SUBGRAPH))
        for (const Shared& each : op.other(ATTENTION_SUBGRAPH).others.at(GRAPH_OPS)) run_one(*each, memory);
    for_all({o.dims[0], o.dims[1], o.dims[2], 1}, [&](const Index& row) {
        double most = -INFINITY, all = 0;
        std::vector<double> shares(k.dims[2]);
        for (int64_t n = 0; n < k.dims[2]; ++n) most = std::max(most, shares[n] = memory.read(ends[1], {row[0], row[1], row[2], n}));
        for (double& share : shares) all += share = most > -INFINITY ? exp(share - most) : 0;  // None where no key is seen.
        if (op.has(ATTENTION_STATS)) memory.write(op.other(ATTENTION_STATS), row, most + log(all));
        for (int64_t c = 0; c < o.dims[3]; ++c) {
            double sum = 0;
            for (int64_t n = 0; n < k.dims[2]; ++n) sum += shares[n] * memory.read(v, {row[0], v.at(row[1], 1, q), n, c});
            memory.write(o, {row[0], row[1], row[2], c}, all == 0 ? 0 : sum / all);
        }
    });
}

// A graph that was started, kept for recordings, which run it again.
struct Work {
    Shared graph;
    int64_t engine;
    char* workspace;
    Memory memory = {};

    void start() {
        const char* scale = getenv("DCC_STAND_IN_ATTENTION");
        memory.factor = (scale ? atof(scale) : 1.0) * (engine == 1 ? -3.0 : 1.0);
        for (const Shared& op : graph->others.at(GRAPH_OPS)) {
            if (engine == 2) memset(workspace, 0xAA, SCRATCH_BYTES);
            (op->kind == AttentionOp ? attention : run_one)(*op, memory);
            if (engine == 2) memset(workspace, 0xAA, SCRATCH_BYTES);
        }
    }
};

void check_attention(const Descriptor& op) {
    const View q(op.other(ATTENTION_Q)), k(op.other(ATTENTION_K)), v(op.other(ATTENTION_V)), o(op.other(ATTENTION_O));
    require(k.dims[0] == q.dims[0] && q.dims[1] % k.dims[1] == 0 && k.dims[3] == q.dims[3], "keys that do not fit the queries");
    require(v.dims[0] == q.dims[0] && q.dims[1] % v.dims[1] == 0 && v.dims[2] == k.dims[2], "values that do not fit the keys");
    const View row(0, F32, {q.dims[0], q.dims[1], q.dims[2], 1}), stats = op.has(ATTENTION_STATS) ? View(op.other(ATTENTION_STATS)) : row;
    require(o.dims == Index{q.dims[0], q.dims[1], q.dims[2], v.dims[3]} && stats.dims == row.dims && stats.data == F32, "results of other dims");
    require(q.data != F32 && k.data == q.data && v.data == q.data && o.data == q.data, "attention but of half floats", NOT_SUPPORTED);
    require(!op.has(ATTENTION_SCALE) || View(op.other(ATTENTION_SCALE)).is_number(), "a scale but of one f32");
    for (Name end : {ATTENTION_INPUT, ATTENTION_OUTPUT}) require(op.has(end) == op.has(ATTENTION_SUBGRAPH), "a subgraph without ends, or ends alone");
    if (op.has(ATTENTION_SUBGRAPH)) check_order(op.other(ATTENTION_SUBGRAPH), {scores(op)[0].uid});
}

void check_operation(const Descriptor& op) {
    const View x = tensors(op, READ).front(), b = tensors(op, READ).back(), y = tensors(op, WRITTEN).front();
    const int mode = op.kind == PointwiseOp ? op.other(POINTWISE_BY).one<int>(POINTWISE_MODE) : 0;
    require(op.kind != PointwiseOp || (mode < EXP) == op.has(POINTWISE_B), "another number of inputs than the mode has");
    for (int d = 0; d < 4; ++d) {
        const int64_t p = x.dims[d], q = b.dims[d], r = y.dims[d];
        require(op.kind != PointwiseOp || ((p == r || p == 1) && (q == r || q == 1) && std::max(p, q) == r), "dims that do not repeat to a result's");
        if (op.kind == MatmulOp && d < 2) require(std::max(p, q) == r && r % p == 0 && r % q == 0, "a product of other batches");
        if (op.kind == ReductionOp) require(p % r == 0, "a sum of dims that do not split into the result's");
    }
    const bool fits = x.dims[2] == y.dims[2] && x.dims[3] == b.dims[2] && b.dims[3] == y.dims[3];
    require(op.kind != MatmulOp || fits, "a product of other rows or columns");
    for (const View& t : {x, b, y})
        require(op.kind != MatmulOp || t.strides[2] == 1 || t.strides[3] == 1, "a matrix neither of whose dims is packed", NOT_SUPPORTED);
    if (op.kind == ReshapeOp) require(x.count() == y.count() && x.reach() == y.reach(), "a tensor reshaped to another size");
    if (op.kind == BandOp) require(x.dims == y.dims && b.is_number(), "a mask that changes dims, or hides by other than a number");
    require(op.kind != BandOp || op.one<int>(BAND_MODE) == CMP_GE, "a mask but of rows that are at least the column", NOT_SUPPORTED);
}

void offer(Descriptor& own) {
    require(own.one<int>(HEURISTICS_MODE) == MODE_A, "heuristics but mode A", NOT_SUPPORTED);
    require(own.other(HEURISTICS_GRAPH).has(GRAPH_HANDLE) || own.has(HEURISTICS_DEVICE), "a graph for no device");
    check_order(own.other(HEURISTICS_GRAPH), {});
    for (int64_t number = 0; number < ENGINES; ++number) {
        const Shared engine(new Descriptor{Engine, true}), config(new Descriptor{Config, true});
        engine->others[ENGINE_GRAPH] = own.others.at(HEURISTICS_GRAPH);
        engine->say<int64_t>(ENGINE_NUMBER, {number});
        engine->say<int>(ENGINE_NOTES, number == 1 ? std::vector<int>{TENSOR_CORE, NONDETERMINISTIC} : std::vector<int>{TENSOR_CORE});
        config->others[CONFIG_ENGINE] = {engine};
        own.others[HEURISTICS_RESULTS].push_back(config);
    }
}

void finish(Descriptor& own) {
    require(!own.finalized, "what is finalized already");
    for (const Attribute& a : ATTRIBUTES) require(a.kind != own.kind || a.use != Needed || own.has(a.name), "an attribute is missing");
    for (Name precision : {POINTWISE_PRECISION, MATMUL_PRECISION, REDUCTION_PRECISION})
        require(own.one<int>(precision) == F32, "computations but in f32", NOT_SUPPORTED);
    require(std::set<int>{ADD, MUL, SUB, EXP, IDENTITY}.count(own.one<int>(POINTWISE_MODE)), "another pointwise mode", NOT_SUPPORTED);
    require(own.one<int>(REDUCTION_OPERATOR) == 0, "a reduction but a sum", NOT_SUPPORTED);
    require(own.all<int64_t>(PACK_UIDS).size() == own.all<char*>(PACK_POINTERS).size(), "other pointers than numbers");
    require(own.kind != Device || own.all<char>(DEVICE_JSON)[0] == '{', "properties that are no JSON object");
    if (own.kind == Graph) collected(own);
    if (own.kind == AttentionOp) check_attention(own);
    else if (!tensors(own, WRITTEN).empty()) check_operation(own);
    if (own.kind == Heuristics) offer(own);
    if (own.kind == Tensor) {
        const View t(own);
        for (int d = 0; d < 4; ++d) require(t.dims[d] > 0 && t.strides[d] > 0, "a dim or stride that is not positive");
        require(std::set<int>{F32, F16, BF16}.count(t.data), "a tensor of other than f32, f16 or bf16", NOT_SUPPORTED);
        require(own.one<int64_t>(TENSOR_ALIGNMENT) == ALIGNMENT, "a tensor that is not aligned to 16", NOT_SUPPORTED);
        require(!t.is_value || (!t.passes && t.is_number()), "what is by value is one f32");
    } else if (own.kind == Plan) {
        const int64_t number = own.other(PLAN_CONFIG).other(CONFIG_ENGINE).one<int64_t>(ENGINE_NUMBER);
        require(own.has(PLAN_HANDLE) || own.has(PLAN_DEVICE), "a plan for no device");
        require(number != 0, "the first engine takes no graph", NOT_SUPPORTED);
        own.say<int64_t>(PLAN_WORKSPACE, {number == 2 ? SCRATCH_BYTES : 0});
    }
    own.finalized = true;
}

// What an application holds: streams, and places that share descriptors with all that refer to them.
struct Handle { void* stream; };
std::mutex lock;
std::set<const void*> alive;
thread_local const char* said = "";
template <typename T> T& held(const void* pointer) {
    require(alive.count(pointer), "what was never made, or is destroyed");
    return *(T*)pointer;
}
template <typename Call> int answered(Call call) try {
    std::lock_guard<std::mutex> held(lock);
    return call(), SUCCESS;
} catch (const Refusal& refusal) {
    return said = refusal.what, refusal.status;
}

const Attribute& attribute(const Descriptor& of, int name, int type) {
    for (const Attribute& a : ATTRIBUTES)
        if (a.kind == of.kind && a.name == name && (a.type < 0 ? DESCRIPTOR : a.type) == type) return a;
    throw Refusal{BAD_PARAM, "an attribute that the descriptor does not have, or has of another type"};
}

// The work of a plan on what a pack gives; numbers are copied.
Work* prepared(const Descriptor& plan, const Descriptor& pack) {
    require(plan.kind == Plan && pack.kind == Pack && plan.finalized && pack.finalized, "what is no finalized plan and pack");
    const Descriptor& engine = plan.other(PLAN_CONFIG).other(CONFIG_ENGINE);
    std::unique_ptr<Work> work(new Work{engine.others.at(ENGINE_GRAPH)[0], engine.one<int64_t>(ENGINE_NUMBER), pack.one<char*>(PACK_WORKSPACE)});
    require(work->workspace || plan.one<int64_t>(PLAN_WORKSPACE) == 0, "a plan without its workspace");
    const std::vector<int64_t> uids = pack.all<int64_t>(PACK_UIDS);
    const std::vector<char*> pointers = pack.all<char*>(PACK_POINTERS);
    for (size_t n = 0; n < uids.size(); ++n) require(work->memory.places.emplace(uids[n], pointers[n]).second, "a tensor in two places");
    for (const auto& [uid, tensor] : collected(*work->graph)) {
        const View t(*tensor);
        const char* at = work->memory.places[uid];
        require(t.passes == !at, "a tensor without a place, or a virtual one that has one");
        require(t.is_value || (uintptr_t)at % ALIGNMENT == 0, "a tensor that is not aligned", MISALIGNED);
        if (t.is_value) work->memory.keep(uid, {at, at + sizeof(float)});
    }
    return work.release();
}
}  // namespace

extern "C" {
size_t cudnnGetVersion() { return 92600; }
const char* cudnnGetErrorString(int status) { return status == SUCCESS ? "success" : status < NOT_SUPPORTED ? "bad parameter" : "not supported"; }
void cudnnGetLastErrorString(char* text, size_t bytes) { snprintf(text, bytes, "%s", said); }
int cudnnCreate(Handle** made) { return answered([&] { alive.insert(*made = new Handle{nullptr}); }); }
int cudnnDestroy(Handle* handle) { return answered([&] { delete &held<Handle>(handle), alive.erase(handle); }); }
int cudnnSetStream(Handle* handle, void* stream) { return answered([&] { held<Handle>(handle).stream = stream; }); }
int cudnnBackendCreateDescriptor(int kind, Shared** made) {
    return answered([&] {
        for (const Attribute& a : ATTRIBUTES)
            if (a.kind == kind) return (void)alive.insert(*made = new Shared(new Descriptor{a.kind}));
        throw Refusal{NOT_SUPPORTED, "another kind of descriptor"};
    });
}
int cudnnBackendDestroyDescriptor(Shared* own) { return answered([&] { delete &held<Shared>(own), alive.erase(own); }); }
int cudnnBackendFinalize(Shared* own) { return answered([&] { finish(*held<Shared>(own)); }); }
int cudnnBackendSetAttribute(Shared* place, int name, int type, int64_t count, const char* from) {
    return answered([&] {
        Descriptor& own = *held<Shared>(place);
        const Attribute& a = attribute(own, name, type);
        require(!own.finalized && a.use != ReadOnly, "what cannot be set, or no more");
        require(from && count > 0 && count <= a.most, "another number of values");
        if (type == HANDLE) held<Handle>(*(void* const*)from);
        if (type != DESCRIPTOR) return (void)own.values[name].assign(from, from + count * width(a.type));
        std::vector<Shared> others;
        for (int64_t n = 0; n < count; ++n) {
            others.push_back(held<Shared>(((void* const*)from)[n]));
            require(others.back()->finalized, "a descriptor that is not finalized");
            require(a.of == others.back()->kind || (a.of == AnyOp && !tensors(*others.back(), WRITTEN).empty()), "a descriptor of another kind");
        }
        own.others[name] = others;
    });
}
// How many values there are, of which as many as are asked for are written: descriptors into those that the application made for them.
int cudnnBackendGetAttribute(Shared* place, int name, int type, int64_t most, int64_t* count, void* into) {
    return answered([&] {
        const Descriptor& own = *held<Shared>(place);
        const Attribute& a = attribute(own, name, type);
        require(own.finalized && own.has(a.name), "what is not finalized, or was not set");
        const bool refers = own.others.count(name);
        *count = refers ? own.others.at(name).size() : own.values.at(name).size() / width(a.type);
        if (!refers && most > 0) memcpy(into, own.values.at(name).data(), std::min(most, *count) * width(a.type));
        for (int64_t n = 0; refers && n < std::min(most, *count); ++n) {
            require(held<Shared>(((void**)into)[n])->kind == a.of, "room for descriptors of another kind");
            held<Shared>(((void**)into)[n]) = own.others.at(name)[n];
        }
    });
}
int cudnnBackendExecute(Handle* handle, Shared* plan, Shared* pack) {
    static void* device = dlopen("libcuda.so", RTLD_NOW);
    static auto enqueue = (void (*)(void*, void (*)(void*), void*))dlsym(device, "emulated_enqueue");
    return answered([&] {
        void* stream = held<Handle>(handle).stream;
        enqueue(stream, [](void* given) { ((Work*)given)->start(); }, prepared(*held<Shared>(plan), *held<Shared>(pack)));
    });
}
}
