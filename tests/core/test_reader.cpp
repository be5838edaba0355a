// The reader as its callers see it: jobs over raw chunks and shards; each has the right voxels or an error, none hangs.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <thread>

#include "check.hpp"
#include "memory.hpp"
#include "stores.hpp"

namespace {

int64_t open_descriptors() {
    int64_t count = 0;
    for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) count += !entry.path().empty();
    return count;
}

#if defined(__SANITIZE_ADDRESS__)
// Whether all threads but this one wait, as Linux tells.
bool others_sleep() {
    int64_t running = 0;
    for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::ifstream file(task.path() / "stat");
        std::string text((std::istreambuf_iterator<char>(file)), {});
        const size_t name_end = text.rfind(')');
        running += name_end == std::string::npos || text.compare(name_end + 2, 1, "S") != 0;
    }
    return running == 1;
}
#endif

// Run something in a process of its own; false where it crashed or its check failed. It is ended after a time.
bool survives(const std::function<void()> &run) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        lc_after_fork();
        alarm(static_cast<unsigned>(2 * LONG));
        run();
        std::_Exit(0);
    }
    int state;
    CHECK(waitpid(child, &state, 0) == child);
    if (state) std::fprintf(stderr, "ended with signal %d, exit %d\n", state & 127, state >> 8);
    return !state;
}

}  // namespace

TEST(random_jobs) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
        Random random(seed);
        Store store(random, seed % 2);
        lc_reader *reader = new_reader(draw(random, 1, 8));
        for (int round = 0; round < 5; ++round) {
            Jobs jobs(store, random, draw(random, 0, 20), draw(random, 0, 1));
            CHECK(jobs.submit(reader) == 0);
            for (int64_t code : jobs.settle()) CHECK(code == LC_OK);
        }
        close_reader(reader);
    }
}

// Every system call fails once: a job either has an error or the right voxels.
TEST(system_calls_fail_once) {
    Random random(1);
    constexpr int KINDS = 3;  // open, fstat, pread
    const int64_t codes[KINDS] = {LC_OPEN, LC_READ, LC_READ};
    for (int sharded = 0; sharded < 2; ++sharded) {
        Store store(random, sharded, 25);
        for (int kind = 0; kind < KINDS; ++kind)
            for (int64_t nth = 1;; ++nth) {
                lc_reader *reader = new_reader();
                Jobs jobs(store, random, 6);
                lc_fail_next(kind, nth, EIO);
                CHECK(jobs.submit(reader) == 0);
                bool failed = false;
                for (int64_t code : jobs.settle()) {
                    CHECK(code == LC_OK || code == codes[kind]);
                    failed |= code != LC_OK;
                }
                lc_fail_next(kind, 0, 0);
                close_reader(reader);
                if (!failed) {
                    CHECK(nth > 1);
                    break;
                }
            }
    }
}

TEST(no_thread_can_be_started) {
    CHECK(survives([] {
        Random random(2);
        Store store(random, false);
        lc_reader *reader = new_reader();
        Jobs jobs(store, random, 3), again(store, random, 3);
        lc_fail_next(4, 1, EAGAIN);
        CHECK(jobs.submit(reader) == 0);
        for (int64_t code : jobs.settle()) CHECK(code == LC_THREAD);
        CHECK(again.submit(reader) == 0);
        for (int64_t code : again.settle()) CHECK(code == LC_OK);
        close_reader(reader);
    }));
}

// Every allocation fails, alone and with those that follow. A call that says that it took no job must not write.
static void allocations_fail(bool sharded, int64_t together) {
    Random random(3 + sharded);
    Store store(random, sharded, 20);
    int64_t good = 0;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    const int64_t step = 4;  // a process is slow to fork there
#else
    const int64_t step = 1;
#endif
    for (int64_t nth = 1; good < 3; nth += step) {
        CHECK(nth < 5000);
        int64_t failed = 0;
        int ends[2];
        CHECK(pipe(ends) == 0);
        const bool survived = survives([&] {
            lc_reader *reader = new_reader();
            Jobs jobs(store, random, 6), again(store, random, 6);
            fail_allocations(nth, together);
            const int64_t state = jobs.submit(reader);
            CHECK(state == 0 || state == 2);
            spare_this_thread(true);
            if (state == 2) usleep(20'000);
            if (state == 0)
                for (int64_t code : jobs.settle()) CHECK(code == LC_OK || code == LC_MEMORY);
            else CHECK(jobs.is_untouched());
            failed = failed_allocations();
            fail_allocations(0, 0);
            CHECK(again.submit(reader) == 0);
            for (int64_t code : again.settle()) CHECK(code == LC_OK);
            CHECK(jobs.is_untouched() || state == 0);
            spare_this_thread(false);
            fail_allocations(1, 1'000'000);
            lc_reader_close(reader);
            CHECK(lc_wait_closed(reader, LONG) == 1);
            fail_allocations(0, 0);
            lc_reader_delete(reader);
            CHECK(write(ends[1], &failed, sizeof failed) == sizeof failed);
        });
        if (!survived) std::fprintf(stderr, "allocation %ld, %ld together\n", nth, together);
        CHECK(survived);
        CHECK(read(ends[0], &failed, sizeof failed) == sizeof failed);
        close(ends[0]);
        close(ends[1]);
        good += !failed;
    }
}
TEST(allocations_fail_once) {
    allocations_fail(false, 1);
    allocations_fail(true, 1);
}
TEST(allocations_fail_together) {
    allocations_fail(false, 40);
    allocations_fail(true, 1000);
}

// What cancel says is what the job ends with.
TEST(cancelled_jobs) {
    Random random(5);
    Store raw(random, false), sharded(random, true);
    for (int round = 0; round < 60; ++round) {
        Store &store = round % 2 ? raw : sharded;
        lc_reader *reader = new_reader();
        Jobs jobs(store, random, 12);
        if (round % 3 == 0) lc_fail_next(2, draw(random, 1, 9), EIO);
        CHECK(jobs.submit(reader) == 0);
        std::vector<int64_t> is_abandoned;
        for (lc_job *job : jobs.jobs) {
            if (draw(random, 0, 1)) std::this_thread::sleep_for(std::chrono::microseconds(draw(random, 0, 200)));
            is_abandoned.push_back(draw(random, 0, 1) ? lc_job_cancel(job) : 0);
        }
        const std::vector<int64_t> codes = jobs.settle();
        lc_fail_next(2, 0, 0);
        for (size_t n = 0; n < codes.size(); ++n) {
            CHECK((codes[n] == LC_CANCELLED) == (is_abandoned[n] != 0));
            CHECK(!lc_job_cancel(jobs.jobs[n]));
        }
        close_reader(reader);
    }
}

TEST(closed_at_any_time) {
    Random random(6);
    Store raw(random, false), sharded(random, true);
    for (int round = 0; round < 60; ++round) {
        Store &store = round % 2 ? raw : sharded;
        lc_reader *reader = new_reader();
        std::vector<std::unique_ptr<Jobs>> all;
        std::atomic<bool> begun{false};
        std::thread closer([&, wait = draw(random, 0, 300)] {
            while (!begun) std::this_thread::yield();
            std::this_thread::sleep_for(std::chrono::microseconds(wait));
            lc_reader_close(reader);
        });
        begun = true;
        for (int n = 0; n < 8; ++n) {
            all.push_back(std::make_unique<Jobs>(store, random, 6));
            CHECK(all.back()->submit(reader) == 0);
        }
        closer.join();
        CHECK(lc_wait_closed(reader, LONG) == 1);
        for (const auto &jobs : all)
            for (int64_t code : jobs->settle()) CHECK(code == LC_OK || code == LC_CLOSED || code == LC_CANCELLED);
        lc_reader_delete(reader);
    }
}

// A handle that is deleted while its jobs are under way: they end all the same.
TEST(deleted_without_close) {
    Random random(7);
    Store raw(random, false, 16), sharded(random, true, 16);
    for (int round = 0; round < 200; ++round) {
        Store &store = round % 2 ? raw : sharded;
        lc_reader *reader = new_reader();
        Jobs jobs(store, random, 6), more(store, random, 6);
        CHECK(jobs.submit(reader) == 0 && more.submit(reader) == 0);
        lc_reader_delete(reader);
        jobs.settle();
        more.settle();
    }
}

TEST(files_are_replaced_meanwhile) {
    Random random(8);
    Store store(random, false, 30);
    std::vector<std::filesystem::path> paths;
    for (const auto &entry : std::filesystem::directory_iterator(store.folder.path))
        if (entry.path() != store.metadata) paths.push_back(entry.path());
    std::atomic<bool> over{false};
    std::thread writer([&] {
        Random own(9);
        while (!over) {
            const auto &path = paths[static_cast<size_t>(draw(own, 0, static_cast<int64_t>(paths.size()) - 1))];
            const auto next = store.folder.path / "next";
            std::filesystem::copy_file(path, next, std::filesystem::copy_options::overwrite_existing);
            if (draw(own, 0, 2) == 0) std::filesystem::rename(next, path);  // as it was: results stay right
            else if (draw(own, 0, 5) == 0) {
                const auto size = std::filesystem::file_size(path);
                std::filesystem::resize_file(path, size / 2);  // in place: an error
                std::filesystem::rename(next, path);
            }
        }
    });
    lc_reader *reader = new_reader();
    for (int round = 0; round < 150; ++round) {
        Jobs jobs(store, random, 6);
        CHECK(jobs.submit(reader) == 0);
        for (int64_t code : jobs.settle())
            CHECK(code == LC_OK || code == LC_SIZE || code == LC_REPLACED || code == LC_SHORT);
    }
    over = true;
    writer.join();
    close_reader(reader);
}

TEST(many_small_jobs) {
    Random random(10);
    Store store(random, true, 12);
    lc_reader *reader = new_reader();
    int64_t descriptors = 0;
    for (int round = 0; round < 1500; ++round) {
        Jobs jobs(store, random, 4);
        CHECK(jobs.submit(reader) == 0);
        for (int64_t code : jobs.settle()) CHECK(code == LC_OK);
        if (round == 100) descriptors = open_descriptors();
    }
    CHECK(open_descriptors() <= descriptors + 4);
    close_reader(reader);
}

#if !defined(__SANITIZE_THREAD__)  // which cannot follow threads that a forked child starts
TEST(forked_child_reads) {
    Random random(11);
    Store store(random, true);
    lc_reader *reader = new_reader();
    Jobs jobs(store, random, 10);
    CHECK(jobs.submit(reader) == 0);
#if defined(__SANITIZE_ADDRESS__)
    // The sanitizer's own locks do not outlive a fork while threads allocate, and threads free memory after the jobs.
    jobs.settle();
    for (int asleep = 0; asleep < 20; usleep(1000)) asleep = others_sleep() ? asleep + 1 : 0;
#endif
    CHECK(survives([&] {
        lc_reader *own = new_reader();
        Jobs fresh(store, random, 10);
        CHECK(fresh.submit(own) == 0);
        for (int64_t code : fresh.settle()) CHECK(code == LC_OK);
        close_reader(own);
        lc_shutdown();
    }));
    jobs.settle();
    close_reader(reader);
}
#endif

TEST(shutdown_with_jobs_in_flight) {
    Random outer(100);
    Store store(outer, true);
    for (int round = 0; round < 20; ++round)
        CHECK(survives([&, round] {
            Random random(static_cast<uint64_t>(round));
            lc_reader *reader = new_reader();
            std::vector<std::unique_ptr<Jobs>> all;
            for (int n = 0; n < 20; ++n) {
                all.push_back(std::make_unique<Jobs>(store, random, 10));
                CHECK(all.back()->submit(reader) == 0);
            }
            lc_shutdown();
            for (const auto &jobs : all)
                for (lc_job *job : jobs->jobs) CHECK(lc_wait_job(job, 0) != 0);  // over, or said that it never will be
            Jobs late(store, random, 2);
            CHECK(late.submit(reader) == 0);
            for (lc_job *job : late.jobs) CHECK(lc_wait_job(job, 0) != 0);
        }));
}

// A file changes at a moment that the test chooses: around a read, by the function that is called in place of libc's.
namespace {
std::function<void(int64_t)> on_read;
std::atomic<int64_t> reads{0};
}  // namespace

extern "C" ssize_t pread(int descriptor, void *to, size_t nbytes, off_t offset) {
    const bool counts = static_cast<bool>(on_read);
    const int64_t number = counts ? reads.fetch_add(2) : 0;
    if (counts) on_read(number);
    const ssize_t got = syscall(SYS_pread64, descriptor, to, nbytes, offset);
    if (counts) on_read(number + 1);
    return got;
}

// All of a store, by one job.
static Jobs whole(Store &store, Random &random) {
    Jobs jobs(store, random, 1);
    jobs.start.assign(RANK, 0);
    jobs.stop.assign(store.shape, store.shape + RANK);
    jobs.strides = {2 * store.shape[1] * store.shape[2], 2 * store.shape[2], 2};
    jobs.outputs[0].assign(store.voxels.size(), UNTOUCHED * 0x0101);
    jobs.address[0] = reinterpret_cast<int64_t>(jobs.outputs[0].data());
    return jobs;
}

// Whether each chunk has the voxels that were written first, or is all ones.
static bool chunks_are_of_one_version(Store &store, const std::vector<uint16_t> &output) {
    std::map<std::vector<int64_t>, int> versions;
    size_t k = 0;
    for (int64_t z = 0; z < store.shape[0]; ++z)
        for (int64_t y = 0; y < store.shape[1]; ++y)
            for (int64_t x = 0; x < store.shape[2]; ++x, ++k) {
                const int first = output[k] == store.at(z, y, x), ones = output[k] == 0xffff;
                int &version =
                    versions.try_emplace({z / store.chunk[0], y / store.chunk[1], x / store.chunk[2]}, 3).first->second;
                version &= first | ones << 1;
                if (!version) return false;
            }
    return true;
}

// At each read of each file, before and behind it, another one takes the file's name, or the file is written to: a
// chunk has one version, or the job an error.
static void file_changes_at_each_read(bool sharded, bool in_place) {
    Random random(12);
    Store store(random, sharded, 20);
    std::vector<std::filesystem::path> paths;
    for (const auto &entry : std::filesystem::directory_iterator(store.folder.path))
        if (entry.path() != store.metadata) paths.push_back(entry.path());
    const auto copy = store.folder.path / "copy", next = store.folder.path / "next";
    int64_t errors = 0, good = 0;
    for (size_t number = 0; number < paths.size(); number += 1 + paths.size() / 6) {
        const auto &path = paths[number];
        std::filesystem::copy_file(path, copy, std::filesystem::copy_options::overwrite_existing);
        const std::string ones(std::filesystem::file_size(path), '\xff');
        for (int64_t at = 0;; ++at) {
            bool changed = false;
            reads = 0;
            on_read = [&](int64_t now) {
                if (now != at) return;
                changed = true;
                if (in_place) {
                    std::fstream(path, std::ios::binary | std::ios::in | std::ios::out) << ones;
                    std::filesystem::last_write_time(
                        path, std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
                } else {
                    write_file(next, ones);
                    std::filesystem::rename(next, path);
                }
            };
            lc_reader *reader = new_reader(1);
            Jobs jobs = whole(store, random);
            CHECK(jobs.submit(reader) == 0);
            CHECK(lc_wait_job(jobs.jobs[0], LONG) == 1);
            close_reader(reader);
            on_read = nullptr;
            lc_error error;
            lc_job_error(jobs.jobs[0], &error);
            CHECK(!error.code || error.code == LC_REPLACED || (sharded && error.code == LC_INDEX));
            if (!error.code) CHECK(chunks_are_of_one_version(store, jobs.outputs[0]));
            ++(error.code ? errors : good);
            std::filesystem::copy_file(copy, path, std::filesystem::copy_options::overwrite_existing);
            if (!changed) break;
        }
    }
    CHECK(good > 0 && (errors > 0 || !in_place));
}
TEST(files_change_at_each_read) {
    for (int sharded = 0; sharded < 2; ++sharded)
        for (int in_place = 0; in_place < 2; ++in_place) file_changes_at_each_read(sharded, in_place);
}

// Hold all descriptors but a few.
static std::vector<int> hold_descriptors(int64_t spare) {
    std::vector<int> held;
    for (int descriptor; (descriptor = open("/dev/null", O_RDONLY)) >= 0;) held.push_back(descriptor);
    CHECK(errno == EMFILE);
    for (; spare > 0; --spare, held.pop_back()) close(held.back());
    return held;
}

static void release(std::vector<int> &held) {
    for (int descriptor : held) close(descriptor);
    held.clear();
}

// More threads than descriptors: reads wait until others close their files.
TEST(reads_share_few_descriptors) {
    Random random(21);
    Store store(random, false, 30);
    lc_reader *reader = new_reader(8);
    const rlimit limit{64, 64};
    CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
    std::vector<int> held = hold_descriptors(2);
    lc_fail_next(6, 2000, 500);  // each read takes 0.5 ms more
    Jobs jobs = whole(store, random);
    CHECK(jobs.submit(reader) == 0);
    CHECK(jobs.settle()[0] == LC_OK);
    release(held);
    close_reader(reader);
}

// Others hold all descriptors for a while, or for longer: then an error tells the limit.
TEST(reads_without_descriptors) {
    Random random(22);
    Store store(random, false, 20);
    lc_reader *reader = new_reader();
    const rlimit limit{64, 64};
    CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
    std::vector<int> held = hold_descriptors(0);
    std::thread later([&] {
        usleep(300'000);
        release(held);
    });
    Jobs jobs = whole(store, random);
    CHECK(jobs.submit(reader) == 0);
    CHECK(jobs.settle()[0] == LC_OK);
    later.join();
    held = hold_descriptors(0);
    Jobs others = whole(store, random);
    CHECK(others.submit(reader) == 0);
    CHECK(others.settle()[0] == LC_OPEN);
    lc_error error;
    lc_job_error(others.jobs[0], &error);
    CHECK(error.number == EMFILE && error.a == 64);
    release(held);
    close_reader(reader);
}
