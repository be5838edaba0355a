// The C interface: no exception leaves it.
#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "codecs.hpp"
#include "device.hpp"
#include "libraries.hpp"
#include "pool.hpp"
#include "reader.hpp"
#include "remote.hpp"

struct lc_reader { std::shared_ptr<lc::Reader> reader; };
struct lc_job {
    std::shared_ptr<lc::Job> job;
    std::weak_ptr<lc::Reader> reader;
};

namespace {

bool is_over(const lc_job *handle) { return !handle || handle->job->is_over(); }

void write_text(char *text, size_t capacity, const char *from) {
    std::strncpy(text, from, capacity - 1);
    text[capacity - 1] = 0;
}

}  // namespace

extern "C" {

int64_t lc_abi(void) { return LC_ABI; }

void lc_record_sizes(int64_t sizes[17]) {
    const size_t known[17] = {sizeof(lc_chain),       sizeof(lc_geometry), sizeof(lc_array),     sizeof(lc_batch),
                              sizeof(lc_error),       sizeof(lc_report),   sizeof(lc_stats),     sizeof(lc_launch),
                              sizeof(lc_decode_plan), sizeof(lc_scatter),  sizeof(lc_on_device), sizeof(lc_device),
                              sizeof(lc_direct_read), sizeof(lc_look),     sizeof(lc_entry),     sizeof(lc_fetch),
                              sizeof(lc_output)};
    for (int n = 0; n < 17; ++n) sizes[n] = static_cast<int64_t>(known[n]);
}

void lc_set_fetch(lc_fetch_object function) { lc::set_fetch(function); }

void lc_set_reads(int64_t count) { lc::Pool::set_waits(count); }

void lc_set_hedging(int64_t allowed) { lc::set_hedging(allowed != 0); }

lc_reader *lc_reader_new(int64_t threads, int64_t index_nbytes, const lc_device *device, char *text) {
    try {
        return new lc_reader{std::make_shared<lc::Reader>(threads, index_nbytes, device)};
    } catch (const std::exception &error) {
        write_text(text, 256, error.what());
        return nullptr;
    }
}

void lc_reader_memory(lc_reader *handle, int64_t slots, int64_t kept, int64_t kept_nbytes) {
    if (lc::Device *device = handle->reader->device())
        device->set_memory(static_cast<lc::DevicePointer>(slots), static_cast<lc::DevicePointer>(kept), kept_nbytes);
    else if (kept_nbytes > 0) handle->reader->keep_on_host(reinterpret_cast<lc::u8 *>(kept), kept_nbytes);
}

void lc_reader_close(lc_reader *handle) { handle->reader->close(); }

int64_t lc_wait_closed(lc_reader *handle, double seconds) { return handle->reader->wait_closed(seconds); }

void lc_reader_delete(lc_reader *handle) { delete handle; }

void lc_reader_stats(lc_reader *handle, lc_stats *stats) {
    const lc::Stats &from = handle->reader->stats;
    const lc::IndexCache &indexes = handle->reader->indexes;
    *stats = {};
    stats->jobs = from.jobs.load();
    stats->chunks = from.chunks.load();
    stats->boxes = from.boxes.load();
    stats->tasks = from.tasks.load();
    stats->bytes_read = from.bytes_read.load();
    stats->index_hits = indexes.hits();
    stats->index_misses = indexes.misses();
    stats->files_opened = from.files_opened.load();
    stats->hedges = from.hedges.load();
    stats->decoded = from.decoded.load();
    stats->plan_seconds = from.plan_seconds.load();
    stats->read_seconds = from.read_seconds.load();
    stats->decode_seconds = from.decode_seconds.load();
    stats->copy_seconds = from.copy_seconds.load();
    if (const lc::KeptChunks *kept = handle->reader->kept()) {
        stats->kept_hits = kept->hits.load();
        stats->kept_misses = kept->misses.load();
        stats->kept_nbytes = kept->kept_nbytes();
    }
    if (const lc::Device *device = handle->reader->device()) device->add_to(*stats);
}

int64_t lc_submit(lc_reader *handle, const lc_batch *batch, lc_job **jobs) {
    std::vector<std::unique_ptr<lc_job>> handles;
    try {
        const int64_t count = batch->one_job ? 1 : batch->region_count;
        for (int64_t n = 0; n < count; ++n) handles.push_back(std::make_unique<lc_job>());
        std::vector<std::shared_ptr<lc::Job>> submitted;
        if (!handle->reader->submit(*batch, submitted)) return 1;
        for (size_t n = 0; n < handles.size(); ++n) {
            handles[n]->job = std::move(submitted[n]);
            handles[n]->reader = handle->reader;
            jobs[n] = handles[n].release();
        }
        return 0;
    } catch (const std::overflow_error &) {
        return 3;
    } catch (...) {
        return 2;
    }
}

int64_t lc_wait_capacity(lc_reader *handle, double seconds) { return handle->reader->wait_capacity(seconds); }

int64_t lc_job_done(lc_job *handle) { return is_over(handle); }

int64_t lc_wait_job(lc_job *handle, double seconds) { return lc_wait_jobs(&handle, 1, seconds); }

int64_t lc_jobs_over(lc_job *const *jobs, int64_t count) { return std::all_of(jobs, jobs + count, is_over); }

namespace {
thread_local double wait_end = 0;
}

int64_t lc_wait_jobs(lc_job *const *jobs, int64_t count, double seconds) {
    const double end = lc::now() + seconds;
    if (seconds > 0 && count && !is_over(jobs[count - 1]))
        if (const std::shared_ptr<lc::Reader> reader = jobs[count - 1]->reader.lock()) reader->help();
    const bool over = std::all_of(jobs, jobs + count, [end](const lc_job *handle) {
        return is_over(handle) || handle->job->wait(std::max(0.0, end - lc::now()));
    });
    wait_end = lc::now();
    return over ? 1 : lc::Pool::shared().stopped() ? -1 : 0;
}

double lc_since_wait(void) { return lc::now() - wait_end; }

int64_t lc_jobs_failed(lc_job *const *jobs, int64_t count, int64_t first) {
    for (int64_t n = first; n < count; ++n)
        if (!jobs[n] || jobs[n]->job->error().code != LC_OK) return n;
    return -1;
}

int64_t lc_jobs_release(lc_job **jobs, int64_t count) {
    if (!lc_jobs_over(jobs, count)) return 0;
    for (int64_t n = 0; n < count; ++n) delete std::exchange(jobs[n], nullptr);
    return 1;
}

int64_t lc_job_cancel(lc_job *handle) { return handle && handle->job->cancel(); }

void lc_job_error(lc_job *handle, lc_error *error) {
    *error = {};
    error->code = LC_CANCELLED;
    if (handle) *error = handle->job->error();
}

void lc_job_report(lc_job *handle, lc_report *report) { *report = handle->job->report(); }

int64_t lc_open_library(int64_t library, const char *path, char *text) {
    try {
        write_text(text, 1024, lc::open_library(library, path).c_str());
        return 0;
    } catch (const std::exception &error) {
        write_text(text, 1024, error.what());
        return 1;
    }
}

int64_t lc_decode(const lc_chain *chain, const void *stored, int64_t nbytes, void *out, int64_t out_nbytes,
                  char *text) {
    try {
        lc::DecodeScratch scratch;
        lc::decode_chunk(*chain, {static_cast<const uint8_t *>(stored), static_cast<size_t>(nbytes)},
                         {static_cast<uint8_t *>(out), static_cast<size_t>(out_nbytes)}, scratch);
        return LC_OK;
    } catch (const lc::DecodeError &error) {
        write_text(text, 256, error.what());
        return LC_DECODE;
    } catch (const std::bad_alloc &) {
        return LC_MEMORY;
    } catch (const std::exception &error) {
        write_text(text, 256, error.what());
        return LC_INTERNAL;
    }
}

void lc_after_fork(void) {
    lc::Pool::forget();
    lc::Limit::forget();
    lc::forget_requests();
}

void lc_shutdown(void) {
    lc::Pool::stop_shared();  // first: its threads wait for requests
    lc::stop_requests();
}

void lc_fail_next(int64_t kind, int64_t nth, int64_t number) {
    lc::faults::armed[kind].number = number;
    lc::faults::armed[kind].left = nth;
}

}  // extern "C"
