#include "driver.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

namespace lc {
namespace {

// Values of cuda.h.
constexpr int NOT_READY = 600;
constexpr unsigned NON_BLOCKING = 1, EVENT_BLOCKING = 1, EVENT_WITHOUT_TIME = 2, PORTABLE = 1;

}  // namespace

const Driver &Driver::loaded() {
    static std::mutex mutex;
    static auto &drivers = *new std::map<std::string, std::unique_ptr<const Driver>>;  // by library: tests load several
    const char *custom_library = std::getenv("LINUMPY_CUDA_DRIVER");
    const std::string library = custom_library ? custom_library : "libcuda.so.1";
    const std::lock_guard lock(mutex);
    auto &driver = drivers[library];
    if (!driver) driver.reset(new Driver(library.c_str()));
    return *driver;
}

template <class Function> void Driver::find(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function) throw DriverError(std::string("the CUDA driver has no ") + name);
}

Driver::Driver(const char *name) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) throw DriverError(dlerror());
    find(library, "cuInit", init_);
    find(library, "cuGetErrorName", error_name_);
    find(library, "cuCtxGetCurrent", get_context_);
    find(library, "cuCtxSetCurrent", set_context_);
    find(library, "cuStreamCreate", stream_create_);
    find(library, "cuStreamDestroy_v2", stream_destroy_);
    find(library, "cuStreamSynchronize", stream_synchronize_);
    find(library, "cuStreamWaitEvent", stream_wait_);
    find(library, "cuEventCreate", event_create_);
    find(library, "cuEventDestroy_v2", event_destroy_);
    find(library, "cuEventRecord", event_record_);
    find(library, "cuEventQuery", event_query_);
    find(library, "cuEventSynchronize", event_synchronize_);
    find(library, "cuEventElapsedTime", event_elapsed_);
    find(library, "cuMemHostAlloc", host_allocate_);
    find(library, "cuMemFreeHost", host_free_);
    find(library, "cuMemcpyHtoDAsync_v2", copy_up_);
    find(library, "cuMemcpyDtoHAsync_v2", copy_down_);
    find(library, "cuLaunchKernel", launch_);
    check(init_(0), "cuInit");
}

void Driver::check(int status, const char *call) const {
    if (!status) return;
    const char *name = nullptr;
    error_name_(status, &name);
    throw DriverError(std::string(call) + ": " + (name ? name : "error " + std::to_string(status)));
}

void *Driver::context() const noexcept {
    void *context = nullptr;
    return get_context_(&context) ? nullptr : context;
}

void Driver::use_context(void *context) const { check(set_context_(context), "cuCtxSetCurrent"); }

Stream Driver::new_stream() const {
    Stream stream;
    check(stream_create_(&stream, NON_BLOCKING), "cuStreamCreate");
    return stream;
}

void Driver::delete_stream(Stream stream) const { stream_destroy_(stream); }

Event Driver::new_event(bool timed) const {
    Event event;
    check(event_create_(&event, EVENT_BLOCKING | (timed ? 0 : EVENT_WITHOUT_TIME)), "cuEventCreate");
    return event;
}

void Driver::delete_event(Event event) const { event_destroy_(event); }
void Driver::record(Event event, Stream stream) const { check(event_record_(event, stream), "cuEventRecord"); }
void Driver::wait(Stream stream, Event event) const { check(stream_wait_(stream, event, 0), "cuStreamWaitEvent"); }
bool Driver::await_briefly(Event event) const {
    int state = 0;
    const bool is_over = spin([&] { return (state = event_query_(event)) != NOT_READY; });
    if (is_over) check(state, "cuEventQuery");
    return is_over;
}
void Driver::await(Event event) const {
    if (!await_briefly(event)) check(event_synchronize_(event), "cuEventSynchronize");
}
void Driver::await_stream(Stream stream) const { check(stream_synchronize_(stream), "cuStreamSynchronize"); }

u8 *Driver::allocate_pinned(i64 nbytes) const {
    void *memory;
    check(host_allocate_(&memory, static_cast<size_t>(nbytes), PORTABLE), "cuMemHostAlloc");
    return static_cast<u8 *>(memory);
}

void Driver::free_pinned(void *memory) const { host_free_(memory); }

double Driver::seconds_between(Event begin, Event end) const {
    float milliseconds;
    check(event_elapsed_(&milliseconds, begin, end), "cuEventElapsedTime");
    return 1e-3 * static_cast<double>(milliseconds);
}

void Driver::copy_up(DevicePointer to, const void *from, i64 nbytes, Stream stream) const {
    if (nbytes) check(copy_up_(to, from, static_cast<size_t>(nbytes), stream), "cuMemcpyHtoDAsync");
}

void Driver::copy_down(void *to, DevicePointer from, i64 nbytes, Stream stream) const {
    if (nbytes) check(copy_down_(to, from, static_cast<size_t>(nbytes), stream), "cuMemcpyDtoHAsync");
}

void Driver::launch(i64 function, i64 grid_x, i64 grid_y, i64 block, i64 shared, Stream stream,
                    void **arguments) const {
    check(launch_(reinterpret_cast<void *>(function), static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y), 1,
                  static_cast<unsigned>(block), 1, 1, static_cast<unsigned>(shared), stream, arguments, nullptr),
          "cuLaunchKernel");
}

}  // namespace lc
