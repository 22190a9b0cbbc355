// A stand-in for libnvrtc.so: compiles kernels by g++ with device.h into a shared library that the stand-in for libcuda runs.
// DCC_STAND_IN_CXX has the command and its flags, as `g++ -O1 -I<folder of device.h>`; DCC_STAND_IN_CACHE a folder that keeps what it made.
// DCC_STAND_IN_FAULT plants a bug: `this=>that` replaces text, which must be there; with `?=>` it need not be in every text.
#include <atomic>
#include <sys/stat.h>
#include <unistd.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <regex>
#include <sstream>
#include <string>

namespace {
struct Program {
    std::string text, log, image;
};

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
}

// The text with CUDA's words, and a way to call each kernel.
std::string emulated(const std::string& text) {
    std::ostringstream out;
    out << "#include \"device.h\"\n" << text << "\n";
    const std::regex entry("__global__\\s+void\\s+(?:__launch_bounds__\\([^)]*\\)\\s+)?(\\w+)\\(");
    for (std::sregex_iterator at(text.begin(), text.end(), entry), end; at != end; ++at) out << "EMULATED_ENTRY(" << (*at)[1] << ")\n";
    return out.str();
}
}  // namespace

extern "C" {
// A version that no NVRTC has: what is kept of this one is not taken for machine code.
int nvrtcVersion(int* major, int* minor) { *major = 1; *minor = 0; return 0; }
const char* nvrtcGetErrorString(int result) { return result == 0 ? "NVRTC_SUCCESS" : "NVRTC_ERROR_COMPILATION"; }
int nvrtcCreateProgram(void** program, const char* text, const char*, int, const char* const*, const char* const*) {
    *program = new Program{text, "", ""};
    return 0;
}
int nvrtcDestroyProgram(void** program) {
    delete (Program*)*program;
    *program = nullptr;
    return 0;
}
int nvrtcCompileProgram(void* handle, int count, const char* const* options) {
    Program& program = *(Program*)handle;
    char target[16] = {};
    for (int n = 0; n < count; n++) sscanf(options[n], "--gpu-architecture=%15s", target);
    if (const char* fault = getenv("DCC_STAND_IN_FAULT")) {
        const char* arrow = strstr(fault, "=>");
        const bool may_lack = arrow && arrow > fault && arrow[-1] == '?';
        const std::string from(fault, arrow ? arrow - fault - may_lack : 0), to(arrow ? arrow + 2 : "");
        size_t at = from.empty() ? std::string::npos : program.text.find(from);
        if (at == std::string::npos && !may_lack) {
            program.log = "there is no `" + from + "` to replace";
            return 6;
        }
        for (; at != std::string::npos; at = program.text.find(from, at + to.size())) program.text.replace(at, from.size(), to);
    }
    const char* given = getenv("DCC_STAND_IN_CXX");
    const char* cache = getenv("DCC_STAND_IN_CACHE");
    if (!given || !cache) {
        program.log = "DCC_STAND_IN_CXX and DCC_STAND_IN_CACHE are not set";
        return 6;
    }
    const std::string text = emulated(program.text), command = given;
    const size_t hash = std::hash<std::string>()(text + command);
    char name[32];
    snprintf(name, sizeof name, "/%016zx", hash);
    const std::string path = std::string(cache) + name, library = path + ".so";
    struct stat found;
    if (stat(library.c_str(), &found) != 0) {
        static std::atomic<int> compiled{0};
        const std::string own = path + "." + std::to_string(getpid()) + "-" + std::to_string(compiled++);
        std::ofstream(own + ".cpp") << text;
        const std::string all = command + " -std=c++17 -fPIC -shared -w -o " + own + ".so " + own + ".cpp 2> " + own + ".log";
        const int result = system(all.c_str());
        program.log = read(own + ".log");
        unlink((own + ".log").c_str());
        if (result != 0) return 6;
        rename((own + ".so").c_str(), library.c_str());
        unlink((own + ".cpp").c_str());
    }
    const std::string made = read(library);
    const uint64_t bytes = made.size();
    program.image = "DCCSTAND";
    program.image.append((const char*)&bytes, 8);
    program.image.append(target, sizeof target);
    program.image += made;
    return 0;
}
int nvrtcGetProgramLogSize(void* program, size_t* size) { *size = ((Program*)program)->log.size() + 1; return 0; }
int nvrtcGetProgramLog(void* program, char* log) { strcpy(log, ((Program*)program)->log.c_str()); return 0; }
int nvrtcGetCUBINSize(void* program, size_t* size) { *size = ((Program*)program)->image.size(); return 0; }
int nvrtcGetCUBIN(void* program, char* image) {
    memcpy(image, ((Program*)program)->image.data(), ((Program*)program)->image.size());
    return 0;
}
int nvrtcGetPTXSize(void* program, size_t* size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(void* program, char* image) { return nvrtcGetCUBIN(program, image); }
}
