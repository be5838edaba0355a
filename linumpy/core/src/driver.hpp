// The CUDA driver, loaded at run time: the core has no link to CUDA.
#pragma once

#include <stdexcept>

#include "common.hpp"

namespace lc {

// A driver call failed.
struct DriverError : std::runtime_error { using std::runtime_error::runtime_error; };

using Stream = void *;
using Event = void *;
using DevicePointer = unsigned long long;

class Driver {
public:
    // Throws DriverError if there is no driver. LINUMPY_CUDA_DRIVER names another library, such as the tests' fake
    // driver.
    static const Driver &loaded();

    // Return the current context of the calling thread; restore it; make another context current.
    void *context() const noexcept;
    void restore_context(void *context) const noexcept { set_context_(context); }
    void use_context(void *context) const;
    Stream new_stream() const;
    void delete_stream(Stream stream) const;
    Event new_event(bool timed = false) const;
    void delete_event(Event event) const;
    void record(Event event, Stream stream) const;
    void wait(Stream stream, Event event) const;
    void await(Event event) const;
    // Wait for an event for a short time; returns whether it is complete.
    bool await_briefly(Event event) const;
    void await_stream(Stream stream) const;
    // Seconds between two events that record times and are complete.
    double seconds_between(Event begin, Event end) const;
    u8 *allocate_pinned(i64 nbytes) const;
    void free_pinned(void *memory) const;
    void copy_up(DevicePointer to, const void *from, i64 nbytes, Stream stream) const;
    void copy_down(void *to, DevicePointer from, i64 nbytes, Stream stream) const;
    void launch(i64 function, i64 grid_x, i64 grid_y, i64 block, i64 shared, Stream stream, void **arguments) const;

private:
    explicit Driver(const char *name);
    template <class Function> void find(void *library, const char *name, Function &function);
    void check(int status, const char *call) const;

    int (*init_)(unsigned);
    int (*error_name_)(int, const char **);
    int (*get_context_)(void **);
    int (*set_context_)(void *);
    int (*stream_create_)(Stream *, unsigned);
    int (*stream_destroy_)(Stream);
    int (*stream_synchronize_)(Stream);
    int (*stream_wait_)(Stream, Event, unsigned);
    int (*event_create_)(Event *, unsigned);
    int (*event_destroy_)(Event);
    int (*event_record_)(Event, Stream);
    int (*event_query_)(Event);
    int (*event_synchronize_)(Event);
    int (*event_elapsed_)(float *, Event, Event);
    int (*host_allocate_)(void **, size_t, unsigned);
    int (*host_free_)(void *);
    int (*copy_up_)(DevicePointer, const void *, size_t, Stream);
    int (*copy_down_)(void *, DevicePointer, size_t, Stream);
    int (*launch_)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void **,
                   void **);
};

}  // namespace lc
