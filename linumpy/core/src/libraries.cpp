#include "libraries.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <memory>
#include <mutex>

#include "codecs.hpp"

namespace lc {
namespace {

struct Close {
    void operator()(void *library) const { dlclose(library); }
};
using Handle = std::unique_ptr<void, Close>;

struct Release {
    unsigned number;  // 10000 · major + 100 · minor + release
    unsigned oldest;  // that is supported: those of distributions with glibc 2.28
};

template <class Functions> struct Library {
    std::atomic<bool> is_open{false};
    Functions functions{};
    std::string text = "it was not opened";  // path and version; if it is not open, the reason
};

// Never destroyed: threads may still decode while the process exits.
struct Libraries {
    std::mutex mutex;
    Library<Zstd> zstd;
    Library<Lz4> lz4;
    Library<Zlib> zlib;
};
Libraries &libraries = *new Libraries;

template <class Function> void find_function(const Handle &library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library.get(), name));
    if (!function) throw std::runtime_error(std::string("it has no ") + name);
}

// Find the functions of a library.
Release load_functions(const Handle &library, Zstd &to) {
    unsigned (*version)();
    find_function(library, "ZSTD_versionNumber", version);
    find_function(library, "ZSTD_createDCtx", to.create);
    find_function(library, "ZSTD_freeDCtx", to.free);
    find_function(library, "ZSTD_decompressDCtx", to.decompress);
    find_function(library, "ZSTD_isError", to.is_error);
    find_function(library, "ZSTD_getErrorName", to.error_name);
    find_function(library, "ZSTD_getFrameContentSize", to.content_size);
    find_function(library, "ZSTD_findFrameCompressedSize", to.frame_nbytes);
    return {version(), 10400};  // the first with a stable ZSTD_findFrameCompressedSize
}

Release load_functions(const Handle &library, Lz4 &to) {
    int (*version)();
    find_function(library, "LZ4_versionNumber", version);
    find_function(library, "LZ4_decompress_safe", to.decompress);
    return {static_cast<unsigned>(version()), 10803};
}

Release load_functions(const Handle &library, Zlib &to) {
    const char *(*version)();
    find_function(library, "zlibVersion", version);
    find_function(library, "inflateInit2_", to.init);
    find_function(library, "inflate", to.inflate);
    find_function(library, "inflateEnd", to.end);
    find_function(library, "uncompress", to.uncompress);
    find_function(library, "zError", to.error);
    ZlibStream stream{};
    if (to.init(&stream, 15, Zlib::VERSION, sizeof stream) != Zlib::OK)  // zlib checks the size of the record
        throw std::runtime_error(std::string("version ") + version() + " has another interface");
    to.end(&stream);
    unsigned numbers[3] = {};
    std::sscanf(version(), "%u.%u.%u", &numbers[0], &numbers[1], &numbers[2]);
    return {10000 * numbers[0] + 100 * numbers[1] + numbers[2], 10211};  // `uncompress` of more than 4 GiB
}

std::string text_of(unsigned version) {
    char text[64];
    std::snprintf(text, sizeof text, "%u.%u.%u", version / 10000, version / 100 % 100, version % 100);
    return text;
}

template <class Functions> std::string open_unless_open(Library<Functions> &library, const char *path) {
    if (library.is_open) return library.text;
    Handle handle(dlopen(path, RTLD_NOW | RTLD_LOCAL));
    if (!handle) throw std::runtime_error(library.text = dlerror());
    link_map *found = nullptr;  // a file name alone may have led to any folder
    const std::string name = dlinfo(handle.get(), RTLD_DI_LINKMAP, &found) ? path : found->l_name;
    try {
        const Release release = load_functions(handle, library.functions);
        if (release.number < release.oldest)
            throw std::runtime_error("version " + text_of(release.number) + " is older than " +
                                     text_of(release.oldest));
        library.text = name + ", version " + text_of(release.number);
    } catch (const std::runtime_error &error) {
        library.text = name + ": " + error.what();
        throw std::runtime_error(library.text);
    }
    handle.release();
    library.is_open = true;
    return library.text;
}

template <class Functions> const Functions &functions_of(const Library<Functions> &library, const char *name) {
    if (library.is_open.load(std::memory_order_acquire)) return library.functions;
    const std::lock_guard lock(libraries.mutex);
    throw DecodeError(std::string(name) + " cannot be loaded: " + library.text);
}

}  // namespace

std::string open_library(i64 number, const char *path) {
    const std::lock_guard lock(libraries.mutex);
    switch (number) {
        case LC_LIBZSTD:
            return open_unless_open(libraries.zstd, path);
        case LC_LIBLZ4:
            return open_unless_open(libraries.lz4, path);
        default:
            return open_unless_open(libraries.zlib, path);
    }
}

const Zstd &zstd() { return functions_of(libraries.zstd, "libzstd"); }
const Lz4 &lz4() { return functions_of(libraries.lz4, "liblz4"); }
const Zlib &zlib() { return functions_of(libraries.zlib, "zlib"); }

}  // namespace lc
