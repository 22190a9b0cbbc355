// A stand-in for libcuda.so.1 on machines without a GPU: memory is the host's, a module is a shared library that the stand-in for
// libnvrtc compiled, a kernel's threads are fibers (see device.h). Every stream is a thread, with pauses of chance, so that work overlaps
// as on a GPU, and what no event orders comes in any order; without a stream work is done at once. One kernel runs at a time.
// Devices: DCC_STAND_IN_DEVICES, 1 by default; they reach each other unless DCC_STAND_IN_APART is set. DCC_STAND_IN_STUCK: the number of
// a launch that never ends. DCC_STAND_IN_UNORDERED: no stream waits for an event. DCC_STAND_IN_LAUNCHES: a file that is told, at the end, how
// many kernels ran in streams.
#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>
#define emulated_state unused_here
#include "device.h"
#undef emulated_state
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace {
using emulated::Function;
using emulated::Index;
using emulated::Running;

Running running;

// A stack and the registers of who waits on it. The first switch to a fiber is the system's; the others save no signals.
using Registers = void*[5];

// One block: its fibers, and what each waits for. Fibers live as long as the process: each runs its thread of one block after the other.
struct Block {
    enum State { Ready, AtBarrier, AtWarp, Done };
    static constexpr size_t STACK = 64 << 10, MOST = 1024;
    struct Fiber {
        Registers registers;
        bool begun;
        State state;
        int place;  // of the barrier
        unsigned warp_mask;
        uint64_t value;   // given to the warp, then got from it
        int from;         // lane to get from; -1: a ballot
        Index index;
        void* fake;  // AddressSanitizer's
    };
    std::vector<Fiber> fibers{MOST};
    unsigned char* stacks = nullptr;
    Registers scheduler;
    int count = 0;  // of threads
    int current = -1;
    void (*entry)(void**);
    void** arguments;
    void* fake;  // AddressSanitizer's, and what it is told of the scheduler's stack
    const void* stack;
    size_t bytes;
    uint64_t seed;
};
Block block;

[[noreturn]] void fail(const char* what) {
    fprintf(stderr, "stand-in device: %s (block %u %u, thread %u)\n", what, running.block.x, running.block.y, running.thread.x);
    abort();
}

// AddressSanitizer is told of switches; that a jump leaves a stack for good, as it thinks of jumps, would be wrong.
#if defined(__SANITIZE_ADDRESS__)
#define SWITCHES __attribute__((noinline, no_sanitize("address")))
void departs(void** fake, const void* stack, size_t bytes) { __sanitizer_start_switch_fiber(fake, stack, bytes); }
void arrives(void* fake, const void** stack, size_t* bytes) { __sanitizer_finish_switch_fiber(fake, stack, bytes); }
#else
#define SWITCHES __attribute__((noinline))
void departs(void**, const void*, size_t) {}
void arrives(void*, const void**, size_t*) {}
#endif

SWITCHES void go(Registers& to) { __builtin_longjmp(to, 1); }

SWITCHES void change(Registers& from, Registers& to) {
    if (!__builtin_setjmp(from)) go(to);
}

// The thread waits, or has ended.
void leave() {
    Block::Fiber& fiber = block.fibers[block.current];
    departs(&fiber.fake, block.stack, block.bytes);
    change(fiber.registers, block.scheduler);
    arrives(fiber.fake, &block.stack, &block.bytes);
}

void barrier(int place) {
    block.fibers[block.current].state = Block::AtBarrier;
    block.fibers[block.current].place = place;
    leave();
}

uint64_t at_warp(unsigned mask, uint64_t value, int from) {
    Block::Fiber& fiber = block.fibers[block.current];
    fiber.state = Block::AtWarp;
    fiber.warp_mask = mask;
    fiber.value = value;
    fiber.from = from;
    leave();
    return block.fibers[block.current].value;
}
uint64_t exchange(unsigned mask, uint64_t value, int from) { return at_warp(mask, value, from); }
unsigned ballot(unsigned mask, bool vote) { return (unsigned)at_warp(mask, vote, -1); }

void start() {
    arrives(nullptr, &block.stack, &block.bytes);
    for (;;) {
        block.entry(block.arguments);
        block.fibers[block.current].state = Block::Done;
        leave();
    }
}

SWITCHES void begin(Block::Fiber& fiber, unsigned char* stack) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = Block::STACK;
    context.uc_link = nullptr;
    makecontext(&context, start, 0);
    fiber.begun = true;
    setcontext(&context);
}

SWITCHES void first(Block::Fiber& fiber, unsigned char* stack) {
    if (!__builtin_setjmp(block.scheduler)) begin(fiber, stack);
}

void resume(int n) {
    Block::Fiber& fiber = block.fibers[n];
    block.current = n;
    running.thread = fiber.index;
    unsigned char* stack = block.stacks + n * Block::STACK;
    departs(&block.fake, stack, Block::STACK);
    if (fiber.begun)
        change(block.scheduler, fiber.registers);
    else
        first(fiber, stack);
    arrives(block.fake, nullptr, nullptr);
}

// Lets a warp's lanes go on that are all there.
bool release_warp(int first) {
    const int count = block.count, lanes = count - first < 32 ? count - first : 32;
    unsigned there = 0, votes = 0;
    for (int l = 0; l < lanes; ++l)
        if (block.fibers[first + l].state == Block::AtWarp) there |= 1u << l;
    if (!there) return false;
    const int leader = __builtin_ctz(there);
    const unsigned mask = block.fibers[first + leader].warp_mask & (lanes == 32 ? ~0u : (1u << lanes) - 1);
    if ((there & mask) != mask) return false;
    uint64_t values[32];
    for (int l = 0; l < lanes; ++l) {
        values[l] = block.fibers[first + l].value;
        if ((mask >> l & 1) && values[l]) votes |= 1u << l;
    }
    for (int l = 0; l < lanes; ++l)
        if (mask >> l & 1) {
            Block::Fiber& fiber = block.fibers[first + l];
            if (fiber.warp_mask != block.fibers[first + leader].warp_mask) fail("lanes of a warp exchange under other masks");
            if (fiber.from >= 0 && !(mask >> fiber.from & 1)) fail("a lane asks one that does not exchange");
            fiber.value = fiber.from < 0 ? votes : values[fiber.from];
            fiber.state = Block::Ready;
        }
    return true;
}

// Lets the block go on if all its threads are at the barrier.
bool release_block() {
    for (int n = 0; n < block.count; ++n)
        if (block.fibers[n].state != Block::AtBarrier && block.fibers[n].state != Block::Done) return false;
    for (int n = 0; n < block.count; ++n) {
        Block::Fiber& fiber = block.fibers[n];
        if (fiber.state == Block::Done) fail("a thread ended where others wait at a barrier");
        if (fiber.place != block.fibers[0].place) fail("threads of a block wait at different barriers");
        fiber.state = Block::Ready;
    }
    return true;
}

uint64_t next_random() {
    block.seed = block.seed * 6364136223846793005ull + 1442695040888963407ull;
    return block.seed >> 33;
}

void shuffle(std::vector<int>& order) {
    for (size_t n = order.size() - 1; n > 0; --n) std::swap(order[n], order[next_random() % (n + 1)]);
}

void run_block() {
    const int count = block.count;
    for (int n = 0; n < count; ++n) block.fibers[n].state = Block::Ready;
    // One warp after the other as far as it comes alone: what a missing barrier lets it overwrite, others have not read yet.
    std::vector<int> warps((count + 31) / 32), lanes(32);
    for (size_t n = 0; n < warps.size(); ++n) warps[n] = (int)n;
    for (int n = 0; n < 32; ++n) lanes[n] = n;
    for (;;) {
        shuffle(warps);
        for (int warp : warps)
            for (;;) {
                shuffle(lanes);
                for (int lane : lanes) {
                    const int n = warp * 32 + lane;
                    if (n < count && block.fibers[n].state == Block::Ready) resume(n);
                }
                if (!release_warp(warp * 32)) break;
            }
        bool done = true;
        for (int n = 0; n < count; ++n) done &= block.fibers[n].state == Block::Done;
        if (done) return;
        if (!release_block()) fail("threads wait for others that never come");
    }
}

// Kernels that ran in streams.
struct Count {
    std::atomic<int> launches{0};
    ~Count() {
        const char* path = getenv("DCC_STAND_IN_LAUNCHES");
        FILE* file = path ? fopen(path, "w") : nullptr;
        if (!file) return;
        fprintf(file, "%d\n", launches.load());
        fclose(file);
    }
} count;

struct Module {
    void* library;
};
std::mutex lock;

uint64_t seed() {
    const char* given = getenv("DCC_STAND_IN_SEED");
    return given ? strtoull(given, nullptr, 10) : 1;
}

// A place in a stream: how often it was recorded, and how many of those have come.
struct Moment {
    std::mutex lock;
    std::condition_variable changed;
    uint64_t recorded = 0, passed = 0;
};
struct Event {
    std::shared_ptr<Moment> moment = std::make_shared<Moment>();
};

using Task = std::function<void()>;
struct Graph {
    std::vector<Task> tasks;
};

// Work in order, on a thread of its own.
struct Stream {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<Task> tasks;
    uint64_t added = 0, done = 0;
    bool ending = false;
    Graph* recording = nullptr;
    std::thread thread;

    Stream() : thread([this] { work(); }) {}
    void work() {
        uint64_t chance = seed() * 0x9E3779B97F4A7C15ull ^ (uintptr_t)this;
        for (;;) {
            Task task;
            {
                std::unique_lock<std::mutex> held(lock);
                changed.wait(held, [this] { return ending || !tasks.empty(); });
                if (tasks.empty()) return;
                task = std::move(tasks.front());
                tasks.pop_front();
            }
            chance = chance * 6364136223846793005ull + 1442695040888963407ull;
            if (chance >> 61 == 0) std::this_thread::sleep_for(std::chrono::microseconds(chance >> 40 & 255));
            task();
            std::lock_guard<std::mutex> held(lock);
            ++done;
            changed.notify_all();
        }
    }
    void add(Task task) {
        std::lock_guard<std::mutex> held(lock);
        if (recording) return recording->tasks.push_back(std::move(task));
        tasks.push_back(std::move(task));
        ++added;
        changed.notify_all();
    }
    bool idle() {
        std::lock_guard<std::mutex> held(lock);
        return done == added;
    }
    // Until all that was added so far is done.
    void wait() {
        std::unique_lock<std::mutex> held(lock);
        const uint64_t due = added;
        changed.wait(held, [&] { return done >= due; });
    }
    void end() {
        {
            std::lock_guard<std::mutex> held(lock);
            ending = true;
            changed.notify_all();
        }
        thread.join();
    }
};

std::mutex streams_lock;
// One that is destroyed while another thread waits for all stays until then; what a program leaves behind is never joined.
std::set<std::shared_ptr<Stream>>& streams = *new std::set<std::shared_ptr<Stream>>;

void run(void* stream, Task task) {
    if (stream) ((Stream*)stream)->add(std::move(task));
    else task();
}
int create(void** stream) {
    std::shared_ptr<Stream> made = std::make_shared<Stream>();
    std::lock_guard<std::mutex> held(streams_lock);
    streams.insert(made);
    *stream = made.get();
    return 0;
}
}  // namespace

extern "C" Running* emulated_device() { return &running; }
// Work of other stand-ins, in a stream.
extern "C" void emulated_enqueue(void* stream, void (*work)(void*), void* given) { run(stream, [=] { work(given); }); }

// The driver's names. Results: 0 is success; 1 invalid value, 2 out of memory, 100 no device, 200 invalid image, 500 not found.
extern "C" {
typedef int CUresult;
static int devices() {
    const char* n = getenv("DCC_STAND_IN_DEVICES");
    return n ? atoi(n) : 1;
}
CUresult cuInit(unsigned) { return devices() > 0 ? 0 : 100; }
CUresult cuDriverGetVersion(int* version) { *version = 13000; return 0; }
CUresult cuDeviceGetCount(int* count) { *count = devices(); return 0; }
CUresult cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal < devices() ? 0 : 101; }
CUresult cuDeviceGetName(char* name, int length, int) { snprintf(name, length, "stand-in"); return 0; }
CUresult cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = (size_t)8 << 30; return 0; }
CUresult cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : attribute == 97 ? 227 << 10 : 0;
    return 0;
}
CUresult cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(intptr_t)(device + 1); return 0; }
CUresult cuDevicePrimaryCtxRelease_v2(int) { return 0; }
CUresult cuCtxSetCurrent(void*) { return 0; }
CUresult cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
CUresult cuCtxSynchronize() {
    std::vector<std::shared_ptr<Stream>> all;
    {
        std::lock_guard<std::mutex> held(streams_lock);
        all.assign(streams.begin(), streams.end());
    }
    for (auto& stream : all) stream->wait();
    return 0;
}
CUresult cuDeviceCanAccessPeer(int* can, int, int) { *can = !getenv("DCC_STAND_IN_APART"); return 0; }
CUresult cuCtxEnablePeerAccess(void*, unsigned) { return getenv("DCC_STAND_IN_APART") ? 217 : 0; }
CUresult cuCtxGetStreamPriorityRange(int* least, int* most) { *least = 0; *most = -5; return 0; }
CUresult cuGetErrorName(CUresult result, const char** name) {
    *name = result == 0 ? "CUDA_SUCCESS" : result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return 0;
}
CUresult cuGetErrorString(CUresult result, const char** text) { return cuGetErrorName(result, text); }
CUresult cuMemAlloc_v2(uintptr_t* at, size_t bytes) {
    // Not a byte more: AddressSanitizer sees where it ends.
    void* made = nullptr;
    if (posix_memalign(&made, 256, bytes) != 0) return 2;
    *at = (uintptr_t)made;
    memset((void*)*at, 0xff, bytes);  // NaN
    return 0;
}
CUresult cuMemFree_v2(uintptr_t at) {
    cuCtxSynchronize();
    free((void*)at);
    return 0;
}
CUresult cuMemGetInfo_v2(size_t* available, size_t* total) { *available = *total = (size_t)8 << 30; return 0; }
CUresult cuMemHostAlloc(void** at, size_t bytes, unsigned) { *at = aligned_alloc(256, (bytes + 255) / 256 * 256); return *at ? 0 : 2; }
CUresult cuMemFreeHost(void* at) { free(at); return 0; }
CUresult cuMemcpyHtoD_v2(uintptr_t to, const void* from, size_t bytes) { memcpy((void*)to, from, bytes); return 0; }
CUresult cuMemcpyDtoH_v2(void* to, uintptr_t from, size_t bytes) { memcpy(to, (void*)from, bytes); return 0; }
CUresult cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, void* stream) {
    run(stream, [=] { memcpy((void*)to, from, bytes); });
    return 0;
}
CUresult cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, void* stream) {
    run(stream, [=] { memcpy(to, (void*)from, bytes); });
    return 0;
}
CUresult cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void* stream) {
    run(stream, [=] { memmove((void*)to, (void*)from, bytes); });
    return 0;
}
CUresult cuMemsetD8Async(uintptr_t at, unsigned char value, size_t bytes, void* stream) {
    run(stream, [=] { memset((void*)at, value, bytes); });
    return 0;
}
CUresult cuStreamCreate(void** stream, unsigned) { return create(stream); }
CUresult cuStreamCreateWithPriority(void** stream, unsigned, int) { return create(stream); }
CUresult cuStreamDestroy_v2(void* handle) {
    std::shared_ptr<Stream> stream;
    {
        std::lock_guard<std::mutex> held(streams_lock);
        for (auto& each : streams)
            if (each.get() == handle) stream = each;
        streams.erase(stream);
    }
    if (!stream) return 1;
    stream->end();
    return 0;
}
CUresult cuStreamSynchronize(void* stream) {
    if (stream) ((Stream*)stream)->wait();
    return 0;
}
CUresult cuStreamQuery(void* stream) { return !stream || ((Stream*)stream)->idle() ? 0 : 600; }
CUresult cuStreamWaitEvent(void* stream, void* event, unsigned) {
    if (getenv("DCC_STAND_IN_UNORDERED")) return 0;
    std::shared_ptr<Moment> moment = ((Event*)event)->moment;
    uint64_t due;
    {
        std::lock_guard<std::mutex> held(moment->lock);
        due = moment->recorded;
    }
    run(stream, [=] {
        std::unique_lock<std::mutex> held(moment->lock);
        moment->changed.wait(held, [&] { return moment->passed >= due; });
    });
    return 0;
}
CUresult cuStreamBeginCapture_v2(void* handle, int) {
    Stream* stream = (Stream*)handle;
    std::lock_guard<std::mutex> held(stream->lock);
    if (stream->recording) return 1;
    stream->recording = new Graph;
    return 0;
}
CUresult cuStreamEndCapture(void* handle, void** graph) {
    Stream* stream = (Stream*)handle;
    std::lock_guard<std::mutex> held(stream->lock);
    if (!stream->recording) return 1;
    *graph = stream->recording;
    stream->recording = nullptr;
    return 0;
}
CUresult cuGraphInstantiateWithFlags(void** made, void* graph, unsigned long long) { *made = new Graph(*(Graph*)graph); return 0; }
CUresult cuGraphDestroy(void* graph) { delete (Graph*)graph; return 0; }
CUresult cuGraphExecDestroy(void* graph) { delete (Graph*)graph; return 0; }
CUresult cuGraphLaunch(void* graph, void* stream) {
    for (const Task& task : ((Graph*)graph)->tasks) run(stream, task);
    return 0;
}
CUresult cuEventCreate(void** event, unsigned) { *event = new Event; return 0; }
CUresult cuEventRecord(void* event, void* stream) {
    std::shared_ptr<Moment> moment = ((Event*)event)->moment;
    uint64_t number;
    {
        std::lock_guard<std::mutex> held(moment->lock);
        number = ++moment->recorded;
    }
    run(stream, [=] {
        std::lock_guard<std::mutex> held(moment->lock);
        if (moment->passed < number) moment->passed = number;
        moment->changed.notify_all();
    });
    return 0;
}
CUresult cuEventQuery(void* event) {
    Moment& moment = *((Event*)event)->moment;
    std::lock_guard<std::mutex> held(moment.lock);
    return moment.passed >= moment.recorded ? 0 : 600;
}
CUresult cuEventSynchronize(void* event) {
    Moment& moment = *((Event*)event)->moment;
    std::unique_lock<std::mutex> held(moment.lock);
    moment.changed.wait(held, [&] { return moment.passed >= moment.recorded; });
    return 0;
}
CUresult cuEventElapsedTime_v2(float* ms, void*, void*) { *ms = 1; return 0; }
CUresult cuEventDestroy_v2(void* event) { delete (Event*)event; return 0; }

CUresult cuModuleLoadData(void** module, const void* image) {
    // An image begins with its bytes and what it is for (see nvrtc.cpp).
    const char magic[8] = {'D', 'C', 'C', 'S', 'T', 'A', 'N', 'D'};
    if (memcmp(image, magic, 8) != 0) return 200;
    uint64_t bytes;
    memcpy(&bytes, (const char*)image + 8, 8);
    // Code for this GPU, or PTX.
    const char* target = (const char*)image + 16;
    if (strcmp(target, "sm_90a") != 0 && strncmp(target, "compute_", 8) != 0) return 209;
    const int file = memfd_create("dcc-kernels", 0);
    const char* from = (const char*)image + 32;
    for (uint64_t done = 0; done < bytes;) {
        const ssize_t wrote = write(file, from + done, bytes - done);
        if (wrote <= 0) return 2;
        done += wrote;
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "stand-in device: %s\n", dlerror());
        return 200;
    }
    Running** state = (Running**)dlsym(library, "emulated_state");
    if (!state) return 200;
    *state = &running;
    *module = new Module{library};
    return 0;
}
CUresult cuModuleUnload(void*) { return 0; }
CUresult cuModuleGetFunction(void** function, void* module, const char* name) {
    const std::string symbol = std::string("emulated_call_") + name;
    void* call = dlsym(((Module*)module)->library, symbol.c_str());
    if (!call) return 500;
    const std::string counted = std::string("emulated_bytes_") + name;
    void* bytes = dlsym(((Module*)module)->library, counted.c_str());
    if (!bytes) return 500;
    *function = new Function{(void (*)(void**))call, 48 << 10, (int (*)(int))bytes};
    return 0;
}
// Attribute 8: the most dynamic shared memory; 48 KiB where nothing is said.
CUresult cuFuncSetAttribute(void* function, int attribute, int value) {
    if (attribute != 8 || value < 0 || value > 227 << 10) return 1;
    ((Function*)function)->shared = (unsigned)value;
    return 0;
}
CUresult cuFuncGetAttribute(int* value, int, void*) { *value = 0; return 0; }
CUresult cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                        void* stream, void** arguments, void**) {
    const unsigned threads = bx * by * bz;
    if (!threads || threads > 1024 || !gx || !gy || !gz || gy > 65535 || gz > 65535 || gx > 0x7fffffffu) return 1;
    const Function kernel = *(Function*)function;
    if (shared > kernel.shared) return 1;
    const auto launch = [=](void** arguments) {
        std::lock_guard<std::mutex> held(lock);  // kernels keep shared memory in statics
        void* dynamic = nullptr;
        if (posix_memalign(&dynamic, 1024, shared) != 0) fail("no memory for a block");
        if (!block.stacks) {
            const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
            void* stacks = mmap(nullptr, Block::MOST * Block::STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
            if (stacks == MAP_FAILED) fail("no memory for stacks");
            block.stacks = (unsigned char*)stacks;
        }
        block.count = (int)threads;
        block.entry = kernel.call;
        block.arguments = arguments;
        block.seed = seed();
        running.threads = {bx, by, bz};
        running.blocks = {gx, gy, gz};
        running.barrier = barrier;
        running.exchange = exchange;
        running.ballot = ballot;
        running.shared = (unsigned char*)dynamic;
        for (unsigned n = 0; n < threads; ++n) block.fibers[n].index = {n % bx, n / bx % by, n / bx / by};
        // One after the other, from the last under even seeds.
        const uint64_t blocks = (uint64_t)gx * gy * gz, last = seed() % 2 == 0 ? blocks - 1 : 0;
        for (uint64_t n = 0; n < blocks; ++n) {
            const uint64_t at = last ? last - n : n;
            running.block = {(unsigned)(at % gx), (unsigned)(at / gx % gy), (unsigned)(at / gx / gy)};
            ++running.number;
            memset(dynamic, 0xff, shared);  // NaN
            run_block();
        }
        free(dynamic);
    };
    if (!stream) {
        launch(arguments);
        return 0;
    }
    static std::atomic<int> launches{0};
    const char* stuck = getenv("DCC_STAND_IN_STUCK");
    if (stuck && launches++ == atoi(stuck)) {
        run(stream, [] { std::this_thread::sleep_for(std::chrono::hours(1)); });
        return 0;
    }
    // The caller's may be gone when the kernel runs.
    std::vector<std::vector<uint64_t>> given;
    for (int n = 0; const int bytes = kernel.bytes(n); ++n) {
        given.emplace_back((bytes + 7) / 8);
        memcpy(given[n].data(), arguments[n], bytes);
    }
    run(stream, [=]() mutable {
        std::vector<void*> places;
        for (auto& argument : given) places.push_back(argument.data());
        ++count.launches;
        launch(places.data());
    });
    return 0;
}
}
