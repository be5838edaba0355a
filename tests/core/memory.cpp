#include "memory.hpp"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

static std::atomic<int64_t> made{0}, first{0}, last{0}, failed{0};

void fail_allocations(int64_t nth, int64_t count) {
    last = 0;
    made = 0;
    failed = 0;
    first = nth;
    last = count ? nth + count - 1 : 0;
}
static thread_local bool spared = false;
void spare_this_thread(bool spare) { spared = spare; }
int64_t failed_allocations() { return failed; }

static void *allocate(std::size_t nbytes, std::size_t alignment) {
    if (last.load() > 0 && !spared) {
        const int64_t number = ++made;
        if (number >= first && number <= last) {
            ++failed;
            throw std::bad_alloc();
        }
    }
    const std::size_t rounded = (nbytes + alignment) / alignment * alignment;  // at least one byte
    void *memory =
        alignment > alignof(std::max_align_t) ? std::aligned_alloc(alignment, rounded) : std::malloc(rounded);
    if (!memory) throw std::bad_alloc();
    return memory;
}

void *operator new(std::size_t nbytes) { return allocate(nbytes, 1); }
void *operator new[](std::size_t nbytes) { return allocate(nbytes, 1); }
void *operator new(std::size_t nbytes, std::align_val_t alignment) {
    return allocate(nbytes, static_cast<std::size_t>(alignment));
}
void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete[](void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void *memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void *memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void *memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void *operator new[](std::size_t nbytes, std::align_val_t alignment) { return operator new(nbytes, alignment); }
void *operator new(std::size_t nbytes, const std::nothrow_t &) noexcept {
    try {
        return operator new(nbytes);
    } catch (...) {
        return nullptr;
    }
}
void *operator new[](std::size_t nbytes, const std::nothrow_t &) noexcept { return operator new(nbytes, std::nothrow); }
void operator delete(void *memory, const std::nothrow_t &) noexcept { std::free(memory); }
void operator delete[](void *memory, const std::nothrow_t &) noexcept { std::free(memory); }
void operator delete[](void *memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void *memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
